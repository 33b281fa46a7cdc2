"""Bytes that a block of a transformer keeps for its backward pass, and sends, with the stream whole
and in slices.

`make bench-sequence`. They are counted: the machine's speed is of no matter.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.memory.accounting import held_bytes
from benchmarks.report_page import circumstances, write_result
from shoal.comm import mappings
from shoal.models import build
from shoal.run.supervised import supervised
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")
TIME, VOCABULARY, WIDTH, BATCH, DEGREES = 64, 256, 256, 8, (2, 4)


def gpt(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return build(
        "gpt", VOCABULARY, (TIME,), {"width": WIDTH, "layers": layers, "heads": 8, "dropout": 0.1}
    )


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def counted(strategy: str, layers: int) -> tuple[int, int]:
    """Bytes kept by this rank's forward pass beside parameters, and bytes it sends in a step,
    in rings. Collective.
    """
    torch.set_num_threads(1)
    run, model = shoal.init(strategy, announce=lambda _: None), gpt(layers)
    tokens = torch.randint(0, VOCABULARY, (2 * BATCH, TIME))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(tokens, tokens), BATCH)
    )
    first, second = loader
    run.forward_backward(supervised(loss_of, model), *first)  # which compares
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with _Sent() as sent, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run.forward_backward(supervised(loss_of, model), *second)
    parameters = [*model.parameters()]
    return held_bytes([*kept, *parameters]) - held_bytes(parameters), sent.sent_bytes


class _Sent:
    """Counts what a ring sends: a sum is a reduce-scatter and an all-gather, each of (T-1)/T of
    the whole.
    """

    def __init__(self) -> None:
        self.sent_bytes, self.patches = 0, ExitStack()

    def __enter__(self) -> _Sent:
        for owner, name, halves, whole in (
            (dist, "all_reduce", 2, 0),
            (mappings, "all_gather", 1, 0),
            (mappings, "reduce_scatter", 1, 1),
        ):
            counting = self._counting(getattr(owner, name), halves, whole)
            self.patches.enter_context(patch.object(owner, name, counting))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def _counting(self, function: Any, halves: int, whole: int) -> Any:
        def call(*tensors: Any, **options: Any) -> Any:
            ranks = dist.get_world_size(options.get("group"))
            self.sent_bytes += halves * tensors[whole].nbytes * (ranks - 1) // ranks
            return function(*tensors, **options)

        return call


def of_a_block(strategy: str, ranks: int) -> dict[str, int]:
    """On the rank that has most, by the difference between models of four blocks and of two."""
    four, two = (world.run(ranks, counted, strategy, layers) for layers in (4, 2))
    kept, sent = (max(a[i] - b[i] for a, b in zip(four, two, strict=True)) // 2 for i in (0, 1))
    return {"kept_bytes": kept, "sent_bytes": sent}


def main() -> None:
    facts = circumstances(("torch", "shoal"))
    found = {
        str(degree): {
            "whole": of_a_block(f"tensor={degree}", degree),
            "slices": of_a_block(f"tensor={degree},sequence=true", degree),
        }
        for degree in DEGREES
    }
    stream_bytes = BATCH * TIME * WIDTH * 4
    result = {"circumstances": facts, "stream_bytes": stream_bytes, "blocks": found}
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
