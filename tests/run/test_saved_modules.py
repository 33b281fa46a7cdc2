"""`torch.save(model)`: a file of the user's model alone, or a refusal that names what to save."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world


def my_hook(*_: Any) -> None:
    """Do nothing: a hook of the user's own, which a file keeps."""


def trained(strategy: str) -> nn.Module:
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)])
    net[0].register_forward_hook(my_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=8)
    net, optimizer, batches = run.prepare(net, optimizer, loader)
    for (x,) in batches:
        run.forward_backward(lambda x: net(x).square().mean(), x)
        optimizer.step()
    model: nn.Module = net
    return model


def saved(strategies: list[str]) -> list[Any]:
    found: list[Any] = []
    for strategy in strategies:
        net, file = trained(strategy), io.BytesIO()
        before = [(dict(vars(m)), len(m._forward_pre_hooks)) for m in net.modules()]
        try:
            torch.save({"model": net, "epoch": 3}, file)
        except UsageError as error:
            found.append((strategy, str(error), len(file.getvalue())))
            continue
        assert before == [(dict(vars(m)), len(m._forward_pre_hooks)) for m in net.modules()]
        file.seek(0)
        loaded = torch.load(file, weights_only=False)["model"]
        hooks = [*loaded[0]._forward_hooks.values()]
        same = torch.equal(loaded(torch.ones(2, 6)), net(torch.ones(2, 6)))
        found.append((strategy, my_hook in hooks and same))
    return found


def test_a_model_that_no_strategy_has_changed_is_saved_as_it_is() -> None:
    strategies = ["ddp", "local=2"]
    for found in world.run(2, saved, strategies):
        assert found == [(strategy, True) for strategy in strategies]


def test_a_model_with_parts_of_a_strategy_is_refused_before_anything_is_written() -> None:
    for found in world.run(2, saved, ["zero3", "pipeline=2", "server=1", "recompute,ddp"]):
        for strategy, text, written in found:
            assert text.startswith("torch.save(model) (")
            assert f"under {strategy}" in text
            assert "run.weights()" in text
            assert written == 0
