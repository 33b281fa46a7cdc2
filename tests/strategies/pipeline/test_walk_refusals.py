"""What cannot be divided between the calls of blocks is refused with the reason, before a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from stages_in_turn import difference, refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).double()
Forward = Callable[[nn.ModuleList, Tensor], Any]


class Blocks(nn.Module):
    """Four equal blocks, and a forward function that a test chooses."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self._function = forward

    def forward(self, x: Tensor) -> Any:
        return self._function(self.h, x)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def in_a_row(h: nn.ModuleList, x: Tensor) -> Tensor:
    for block in h:
        x = block(x)
    return x


def exits_early(h: nn.ModuleList, x: Tensor) -> Tensor:
    for block in h:
        x = block(x)
        if x.mean() > 5:
            break
    return x


def hides_errors(h: nn.ModuleList, x: Tensor) -> Tensor:
    try:
        return exits_early(h, x)
    except Exception:  # noqa: BLE001 - what a test of it needs
        return x


def catches_everything(h: nn.ModuleList, x: Tensor) -> Tensor:
    out = x
    with suppress(BaseException):
        out = in_a_row(h, x)
    return out


def looks_at_data(h: nn.ModuleList, x: Tensor) -> Tensor:
    x = h[1](h[0](x))
    weights = x.data.numpy()
    return h[3](h[2](x * float(weights.max())))


def checkpoints_with_reentry(h: nn.ModuleList, x: Tensor) -> Tensor:
    x = h[0](x)
    for block in h[1:]:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def checkpoints_across_stages(h: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint(lambda x: in_a_row(h, x), x, use_reentrant=False)


class Reversed(torch.autograd.Function):
    """Reverse gradients, as adversarial training of domains does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class ReversedLinear(nn.Linear):
    """Reverse gradients inside of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(reverse(x))


def reverse(x: Tensor) -> Tensor:
    output: Tensor = Reversed.apply(x)
    return output


def reverses_gradients(h: nn.ModuleList, x: Tensor) -> Tensor:
    x = torch.tanh(h[1](h[0](x)))
    return h[2](x) + h[3](reverse(x))


def normalises_a_weight(h: nn.ModuleList, x: Tensor) -> Tensor:
    weight = h[0][0].weight.data
    weight[:-1].div_(weight[:-1].norm(dim=1, keepdim=True))
    return in_a_row(h, x) + h[0](x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (exits_early, "bool() looks at a value of gt, which another rank computes"),
        (hides_errors, "bool() looks at a value of gt, which another rank computes"),
        (looks_at_data, "numpy() looks at a value of data, which another rank computes"),
        (catches_everything, "it catches BaseException, by which a stage ends"),
        (checkpoints_with_reentry, "use use_reentrant=False"),
        (reverses_gradients, "Call it inside a block that has parameters"),
        (normalises_a_weight, "compute_loss, or a forward pass, writes into h.0.0.weight"),
    ],
)
def test_the_reason_is_told(function: Forward, message: str) -> None:
    model = Blocks(function).double()
    assert message in refusal(model, loss_of(model), (ROWS,), 2)


def checkpointed_across_stages() -> str:
    run = shoal.init("pipeline=2,balance=parameters", announce=lambda _: None)
    model = Blocks(checkpoints_across_stages).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    try:
        run.forward_backward(loss_of(model), run.share(ROWS))
    except StrategyRefused as error:
        return str(error)
    return ""


def test_a_checkpoint_around_blocks_of_several_ranks_is_refused() -> None:
    for message in world.run(2, checkpointed_across_stages):
        assert "a checkpoint computes the block h.0 again, which another rank has" in message
        assert "Checkpoint block by block" in message


def test_a_function_of_ones_own_inside_a_block_is_exact() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), ReversedLinear(8, 8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers).double()
    assert difference(model, lambda x: model(x).square().mean(), (ROWS,), 2) <= 1e-10


class Scale(nn.Module):
    """Keeps what it computes in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(x * self.weight)
        return self.seen * 2


def test_no_stage_begins_between_a_block_and_what_reads_its_inside() -> None:
    model = nn.Sequential(*[Scale() for _ in range(4)]).double()

    def compute_loss(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss + model[0].seen.mean()

    told = refusal(model, compute_loss, (ROWS,), 2)
    assert "0 makes something that it does not return and mean uses later" in told
    assert "Return it from the block, or switch it off" in told


def test_hooks_inside_of_blocks_make_smaller_units() -> None:
    seen: list[Tensor] = []
    model = Blocks(in_a_row).double()
    model.h[0][0].register_forward_hook(lambda *call: seen.append(call[2]))

    def compute_loss(x: Tensor) -> Tensor:
        seen.clear()
        loss: Tensor = model(x).square().mean() + seen[0].mean()
        return loss

    assert difference(model, compute_loss, (ROWS,), 2) < 1e-12


class Remembering(nn.Module):
    """Writes into a buffer in the code around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        assert isinstance(self.mean, Tensor)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_buffers_written_around_the_blocks_are_refused() -> None:
    model = Remembering().double()
    assert "writes into the buffer mean" in refusal(model, loss_of(model), (ROWS,), 2)


def hooks_on_blocks(h: nn.ModuleList, x: Tensor) -> Tensor:
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda *call: states.append(call[2])) for block in h]
    try:
        x = in_a_row(h, x)
    finally:
        for hook in hooks:
            hook.remove()
    return x + sum(state.mean() for state in states)


def writes_in_place(h: nn.ModuleList, x: Tensor) -> Tensor:
    out = torch.zeros(3, *x.shape, dtype=x.dtype)
    for index, block in enumerate(h[:3]):
        x = block(x)
        x = x.mul(2).add_(1)
        out[index] = x
        x[:, 0] = 0
    return h[3](x) + out.sum(0)


def checkpoints(h: nn.ModuleList, x: Tensor) -> Tensor:
    for block in h:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def without_gradients(h: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = h[1](h[0](x))
    return h[3](h[2](h[1](h[0](x)))) - teacher


def indexes_by_the_batch(h: nn.ModuleList, x: Tensor) -> Tensor:
    mask = x[:, 0] > 0
    if mask.all():
        return x
    x = in_a_row(h, x)
    return torch.where(mask[:, None], x, 0.0) + x[mask].sum()


def dicts_and_lists(h: nn.ModuleList, x: Tensor) -> Tensor:
    state = {"x": x, "kept": [x]}
    for block in h:
        state["x"] = block(state["x"])
        state["kept"].append(state["x"] * 2)  # type: ignore[attr-defined]
    return torch.stack(state["kept"][1:]).sum(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        hooks_on_blocks,
        writes_in_place,
        checkpoints,
        without_gradients,
        indexes_by_the_batch,
        dicts_and_lists,
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_code_around_blocks_may_do(function: Forward, num_stages: int) -> None:
    model = Blocks(function).double()
    assert difference(model, loss_of(model), (ROWS,), num_stages) < 1e-12
