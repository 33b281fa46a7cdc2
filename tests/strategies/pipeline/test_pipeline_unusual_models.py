"""Models and losses that do more than one thing: what gets no gradient gets none, what is
called twice counts twice.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ShoalError, UsageError
from shoal.run import init_with_place
from shoal.run.supervised import supervised
from shoal.strategies.pipeline.p2p import NO_GRADIENT, Message, StageComm, TensorMeta, decode_metas
from shoal.strategies.pipeline.schedules import table
from shoal.testing import world
from tests.matrix.cases import image_loader


class Asides(nn.Module):
    """Two outputs that the loss ignores, by layers on two ranks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.aside, self.b = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.late, self.c = nn.Linear(12, 12, bias=False), nn.Linear(12, 10)
        self.late.weight = self.aside.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.a(x.flatten(1))
        aside = self.aside(hidden)
        later = torch.tanh(self.b(hidden))
        return self.c(later), aside, self.late(later)


class Twice(nn.Module):
    """A BatchNorm that is called twice, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = (
            nn.BatchNorm1d(64),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 10),
        )
        self.table = torch.full((64,), 0.5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(self.norm(x.flatten(1)))))
        output: Tensor = self.c(x * self.table)
        return output


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(12, 12), norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


def sharing() -> nn.Module:
    """One module with running statistics, and no weights, in two blocks."""
    norm = nn.BatchNorm1d(12, affine=False)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), Block(norm), Block(norm), nn.Linear(12, 10)
    )


class Halving(nn.Module):
    """Halves its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(_half)
        return torch.tanh(y)


def _half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halving() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), *(Halving() for _ in range(4)), nn.Linear(12, 10)
    )


def first(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


def trained(
    strategy: str, model_fn: Callable[[], nn.Module], loss_fn: Any, steps: int = 2
) -> dict[str, Tensor]:
    """Weights and buffers after some steps with momentum and weight decay, whole."""
    run = init_with_place(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = model_fn().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, image_loader())
    for (x, target), _ in zip(loader, range(steps), strict=False):
        optimizer.zero_grad()
        run.forward_backward(supervised(loss_fn, model), x, target)
        optimizer.step()
    return {name: value.clone() for name, value in run.weights().items()}


def scenes(alone: bool) -> tuple[list[dict[str, Tensor]], list[str]]:
    strategies = [
        "pipeline=2,microbatches=2,cuts=b",
        "pipeline=2,microbatches=2,schedule=zero-bubble,cuts=b",
        "pipeline=2,schedule=naive,cuts=c",
    ]
    models: list[tuple[Callable[[], nn.Module], Any]] = [
        (Asides, first),
        (Asides, first),
        (Twice, F.cross_entropy),
    ]
    if alone:
        return [trained("single", *models[0])] * 2 + [trained("single", *models[2])], []
    refusals = [refusal("pipeline=2,cuts=3", sharing), refusal("pipeline=2,schedule=zbv", halving)]
    return [
        trained(*scene) for scene in zip(strategies, *zip(*models, strict=True), strict=True)
    ], refusals


def refusal(strategy: str, model_fn: Callable[[], nn.Module]) -> str:
    try:
        trained(strategy, model_fn, F.cross_entropy)
    except ShoalError as error:
        return str(error)
    return ""


def test_a_pipeline_is_one_process_or_says_why_not() -> None:
    expected, _ = scenes(alone=True)
    for found, (shares_statistics, halves_gradients) in world.run(2, scenes, False):
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
        assert "2.norm has buffers and is called in stages of ranks [0, 1]" in shares_statistics
        assert "Use schedule=1f1b or schedule=interleaved" in halves_gradients


class Unconnected:
    """The part of a P2PLink that a header needs."""

    def __init__(self) -> None:
        self.axis, self.rank, self.size, self.device = self, 1, 2, torch.device("cpu")
        self.sent_headers: dict[Any, Any] = {}
        self.sent: list[Tensor] = []

    def send(self, tensor: Tensor, receiver: int) -> int:
        self.sent.append(tensor)
        return len(self.sent)


def test_a_loss_that_depends_on_other_parts_of_the_output_later_is_refused() -> None:
    link = Unconnected()
    comm = StageComm(link, table("1f1b", 2, 3), lambda _: "")  # type: ignore[arg-type]
    one, none = TensorMeta(torch.float32, (2,), True), NO_GRADIENT
    comm._send_header(Message("B", 0, 0), (one, none), 0)
    comm._send_header(Message("B", 0, 1), (one, none), 0)
    assert [decode_metas(tensor) for tensor in link.sent] == [(one, none)]
    with pytest.raises(
        UsageError, match="depended on number 0 before and depends on number 0, number 1 now"
    ):
        comm._send_header(Message("B", 0, 2), (one, one), 0)
