"""Buffers that a forward pass writes from a batch are named where ranks write other values."""

from typing import Any

import torch
import torch.nn.functional as F
from minimal_script import parts
from torch import Tensor, nn

import shoal
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Running(nn.Module):
    """A linear layer behind a moving average of its inputs, and a counter of passes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.1)
            self.passes.add_(1)
        scores: Tensor = self.layer(x)
        return scores


def notes(accumulate: int, by_function: bool = True) -> list[str]:
    lines: list[str] = []
    run = shoal.init(announce=lines.append, accumulate=accumulate)
    model, _, loader = run.prepare(*parts(Running().double()))
    for x, y in loader:
        if by_function:
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        else:
            run.backward(F.cross_entropy(model(x), y))
    return [line for line in lines if "buffers" in line]


def test_buffers_that_differ_between_ranks_are_named_once() -> None:
    """Also those that a loop has written before its loss."""
    calls = (1, True), (1, False)
    assert in_turn(notes, *calls) == [[], []]
    for lines in world.run(2, in_turn, notes, *calls)[0]:
        assert len(lines) == 1
        assert lines[0].startswith("note: center: a forward pass writes these buffers")


def test_buffers_that_micro_batches_write_are_named() -> None:
    (line,) = notes(2)
    assert line.startswith("note: center, passes: a forward pass writes these buffers")


def bounded(module: nn.Module, before: Any, after: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.clamp(-0.01, 0.01) for gradient in before)


def notes_on_hooks(hooked: bool) -> list[str]:
    lines: list[str] = []
    run = shoal.init(announce=lines.append)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    if hooked:
        layers[1].register_full_backward_hook(bounded)
    model, _, loader = run.prepare(*parts(layers))
    for x, y in loader:
        run.backward(F.cross_entropy(model(x), y))
    return [line for line in lines if "backward hook" in line]


def test_a_hook_that_may_bound_gradients_of_some_rows_is_named_once() -> None:
    assert in_turn(notes_on_hooks, (True,)) == [[]]
    for found in world.run(2, in_turn, notes_on_hooks, (True,), (False,))[:1]:
        assert len(found[0]) == 1
        assert found[0][0].startswith("note: 1: a backward hook sees gradients of some rows")
        assert not found[1]


def notes_of_stages() -> list[str]:
    """Train a model whose last layer counts its passes, on the last stage."""
    lines: list[str] = []
    run = shoal.init("pipeline=2,microbatches=2", announce=lines.append)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), Running(8)).double()
    model, _, loader = run.prepare(*parts(net))
    for x, y in loader:
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return [line for line in lines if "buffers" in line]


def test_buffers_of_other_stages_are_named_too() -> None:
    first, _ = world.run(2, notes_of_stages)
    (line,) = first
    assert line.startswith("note: 3.center, 3.passes: a forward pass writes these buffers")


class Instances(nn.Module):
    """A linear layer behind an InstanceNorm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(self.norm(x.view(-1, 2, 2)).flatten(1))
        return scores


def notes_of_instances() -> list[str]:
    lines: list[str] = []
    run = shoal.init(announce=lines.append)
    model, _, loader = run.prepare(*parts(Instances().double()))
    for x, y in loader:
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return [line for line in lines if "buffers" in line]


def test_running_statistics_of_instance_norms_are_named() -> None:
    first, _ = world.run(2, notes_of_instances)
    assert len(first) == 1
    assert first[0].startswith("note: norm.running_mean, norm.running_var: a forward pass writes")
