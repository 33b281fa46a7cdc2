"""Residuals of compression belong to parameters, whatever the partitions are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shoal.comm.compression import parse
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.strategies.grad_checks import FiniteCheck
from shoal.strategies.server.gradient_pusher import GradientPusher


def pusher(part_bytes: int) -> GradientPusher:
    kinds = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3),
        "c": torch.randn(4, 3, 2, 2),
        "d": torch.tensor(1.0),
    }
    kinds["c"] = kinds["c"].to(memory_format=torch.channels_last)
    parameters = {name: nn.Parameter(value) for name, value in kinds.items()}
    parts = partition(
        {name: ParamMeta(p.numel(), p.dtype, 0) for name, p in parameters.items()}, part_bytes
    )
    client: Any = SimpleNamespace(parts=parts)
    return GradientPusher(client, FlatParams(parameters, parts), None, FiniteCheck())


def test_residuals_are_kept_when_partitions_change():
    before, after = pusher(40), pusher(200)
    assert len(before.client.parts) > len(after.client.parts)
    assert before.residuals() == {}
    before.left_out = {part.number: torch.randn(part.length) for part in before.client.parts}
    said = before.residuals()
    after.load(said)
    assert {number: value.shape for number, value in after.left_out.items()} == {
        part.number: (part.length,) for part in after.client.parts
    }
    assert all(torch.equal(found, said[name]) for name, found in after.residuals().items())
    before_again = pusher(40)
    before_again.load(after.residuals())
    assert all(
        torch.equal(before_again.left_out[number], value)
        for number, value in before.left_out.items()
    )


def test_loading_no_residuals_begins_at_zero():
    later = pusher(40)
    later.compression = parse("topk=0.5")
    assert later.compression is not None
    later.flat.gradients[0].copy_(torch.randn(later.client.parts[0].length))
    later._message(0)
    assert later.left_out[0].any()
    later.load({})
    later.flat.gradients[0].zero_()
    later._message(0)
    assert not later.left_out[0].any()


def test_a_pusher_without_residuals_loads_none():
    fresh = pusher(40)
    fresh.load({})
    assert fresh.left_out == {}
