"""Sequence parallel activations give the numbers of one device, and a rank keeps only its
tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sequence_parallel_models import IN_SLICES
from tensor_parallel_models import CUT, gpt
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import StrategyRefused
from shoal.strategies.tensor.region import sum_of_ranks
from shoal.strategies.tensor.sequence import SequenceParallelTensor, gather_all
from shoal.strategies.tensor.strategy import TensorParallel, describe, tensor_plan
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from tests.matrix.cases import EXPERIMENTS, tokens

SLOW = pytest.mark.slow
QUICK = ("between",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in IN_SLICES]
)
def test_slices_of_the_sequence_are_one_device(name: str) -> None:
    check_strategy("tensor=2,sequence=true", 2, IN_SLICES[name])


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate", "name"),
    [
        pytest.param("tensor=2,sequence=true,zero3", 4, 2, "gpt", marks=SLOW),
        pytest.param("tensor=4,sequence=true", 4, 1, "one token", marks=SLOW),
        pytest.param("tensor=2,sequence=true,recompute,unit=Core", 2, 1, "rows", marks=SLOW),
        pytest.param(
            "tensor=2,sequence=true,pipeline=2,balance=parameters,schedule=zero-bubble",
            4,
            1,
            "gpt",
            marks=SLOW,
        ),
    ],
)
def test_slices_of_the_sequence_go_with_the_rest(
    strategy: str, ranks: int, accumulate: int, name: str
) -> None:
    check_strategy(strategy, ranks, IN_SLICES[name], accumulate)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_a_model_without_a_sequence_is_refused(name: str) -> None:
    with pytest.raises(
        StrategyRefused, match="nothing says that its stream is a sequence of tokens"
    ):
        tensor_plan(CUT[name].model_fn(), TensorParallel(2, sequence=True))


def test_an_lstm_is_refused() -> None:
    with pytest.raises(StrategyRefused, match="its state is needed whole at every time step"):
        tensor_plan(EXPERIMENTS["lstm"].model_fn(), TensorParallel(2, sequence=True))


def test_the_head_of_a_run_says_what_lies_in_slices_of_the_sequence() -> None:
    said = describe(tensor_plan(gpt(), TensorParallel(2, sequence=True)), sequence=True)
    (found,) = [line for line in said if "sequence" in line]
    assert "activations between these layers, in all that takes each token by itself" in found


Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes x (3, 5, 4), a weight (4,) and a tensor with tokens (5, 4)."""


def value_read_before(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        size = x[:, 0].abs().max()
    return x[:, 0] * w + size


FUNCTIONS: dict[str, Function] = {
    "looked at before": value_read_before,
    "add": lambda x, w, t: x + t,
    "add to what is whole": lambda x, w, t: t - x,
    "weigh": lambda x, w, t: w * x / (x * x + 1),
    "weigh tokens": lambda x, w, t: x * t[None, :, :1],
    "weigh samples": lambda x, w, t: x * t[:3, :1].unsqueeze(1),
    "in place": lambda x, w, t: (x * 2).add_(t),
    "add up": lambda x, w, t: torch.zeros(3, 5, 4).double().add_(x),
    "layer_norm": lambda x, w, t: F.layer_norm(x, (4,), w, w),
    "layer_norm without weights": lambda x, w, t: F.layer_norm(x, (4,)),
    "layer_norm over tokens": lambda x, w, t: F.layer_norm(x, (5, 4), t, t),
    "rms_norm": lambda x, w, t: F.rms_norm(x, (4,), w, 1e-3),
    "rms_norm over tokens": lambda x, w, t: F.rms_norm(x, (5, 4), t, 1e-3),
    "gelu": lambda x, w, t: F.gelu(x, approximate="tanh") + F.silu(x) * (-x).exp(),
    "another precision": lambda x, w, t: x.float().double() ** 2,
    "power": lambda x, w, t: x.pow(3) + (x.abs() + 1).sqrt() + torch.rsqrt(x.square() + 1),
    "mean of a token": lambda x, w, t: x * x.mean(-1, keepdim=True) + x.mean(-1).unsqueeze(-1),
    "mean of tokens": lambda x, w, t: x * x.mean(1, keepdim=True) * x.mean(),
    "sums": lambda x, w, t: x.sum(0) * w + x.sum((0, 1)) + x.sum(),
    "transposed": lambda x, w, t: (x.transpose(0, 1) * w).transpose(-2, -3) + x,
    "a token": lambda x, w, t: x[:, 0] * w,
    "tokens": lambda x, w, t: torch.cat([x[:, 1:], x[:, :1]], dim=1) * t,
    "matrix": lambda x, w, t: x @ t.T,
    "linear": lambda x, w, t: F.linear(x, t, t[:, 0]),
    "convolution": lambda x, w, t: F.conv1d(x, t.T.unsqueeze(-1)),
    "softmax over tokens": lambda x, w, t: x.softmax(1) * t,
    "cumsum": lambda x, w, t: x.cumsum(1) * w,
    "views": lambda x, w, t: x.view(3, 20).reshape(15, 4).unflatten(0, (3, 5)).permute(2, 0, 1),
    "chosen": lambda x, w, t: torch.where(x > 0, x, t),
    "dropout": lambda x, w, t: F.dropout(x, 0.4) * w,
    "dropout of what was expanded": lambda x, w, t: F.dropout(
        t.expand(3, -1, -1)[:, : x.shape[1]] + x, 0.4
    ),
    "dropout beside what was transposed": lambda x, w, t: F.dropout(t.T.contiguous().T * x, 0.4),
    "dropout of what was transposed": lambda x, w, t: F.dropout(x.transpose(0, 1), 0.4) * 2,
}


def differences_by_function(length: int) -> dict[str, float]:
    """Return the largest difference of values and gradients, for each function."""
    run = shoal.init("tensor=2", announce=lambda _: None)
    torch.manual_seed(0)
    found = {}
    inputs = (torch.randn(3, 5, 4), torch.randn(4), torch.randn(5, 4))
    for name, function in FUNCTIONS.items():
        x, w, t = (value.double().requires_grad_() for value in inputs)
        x, t = (x[:, :length], t[:length]) if length < 5 else (x, t)
        if length < 5 and not SHORT.isdisjoint(name.split()):
            continue
        torch.manual_seed(1)
        one = function(x, w, t)
        expected = torch.autograd.grad((one**2).sum(), (x, w, t), allow_unused=True)
        torch.manual_seed(1)
        sliced = sum_of_ranks(x / 2, run.mesh.tensor, 1)
        other = gather_all(function(sliced, w, t))
        sharded_gradients = torch.autograd.grad((other**2).sum(), (x, w, t), allow_unused=True)
        assert not isinstance(other, SequenceParallelTensor)
        found[name] = (one - other).abs().max().item()
        for index, (right, own) in enumerate(zip(expected, sharded_gradients, strict=True)):
            assert (right is None) == (own is None)
            if right is not None:
                assert not isinstance(own, SequenceParallelTensor)
                # Each rank gave half of x, and has the gradient of that.
                found[f"{name}, gradient {index}"] = (
                    (right - own * (2 if index == 0 else 1)).abs().max().item()
                )
    return found


SHORT = {"samples", "over", "views", "up"}
"""Words of functions that need all five tokens."""


@pytest.mark.parametrize("length", [5, pytest.param(1, marks=SLOW)])
def test_every_function_gives_what_it_gives_of_the_whole(length: int) -> None:
    for found in world.run(2, differences_by_function, length):
        assert max(found.values()) < 1e-12, max(found.items(), key=lambda item: item[1])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def entry(x: Tensor, w: Tensor) -> Tensor:
    x[:, 0] = w
    return x * w


def view_of_full(x: Tensor, w: Tensor) -> Tensor:
    x.view(-1).add_(1.0)
    return x * w


def alias(x: Tensor, w: Tensor) -> Tensor:
    other = x
    x += w
    return other * x


def transposed(x: Tensor, w: Tensor) -> Tensor:
    other = x.transpose(0, 1)
    x *= w
    return other * w


def function_of_script(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)
    result: Tensor = Double.apply(x)
    return result


def checkpoint_of_script(x: Tensor, w: Tensor) -> Tensor:
    x += w
    result: Tensor = checkpoint(lambda y: y * w + y[:, :1], x, use_reentrant=True)
    return result


def kept_gradient(x: Tensor, w: Tensor) -> Tensor:
    x.retain_grad()
    x.register_hook(lambda gradient: gradient * 3)
    (x * w).sum().backward(retain_graph=True)
    assert x.grad is not None
    return x * x.grad


WRITES = (
    *(entry, view_of_full, alias, transposed, function_of_script, checkpoint_of_script),
    kept_gradient,
)


def differences_by_write() -> dict[str, float]:
    run = shoal.init("tensor=2", announce=lambda _: None)
    found = {}
    for write in WRITES:
        values = []
        for is_sharded in (False, True):
            x = torch.arange(60.0).view(3, 5, 4).requires_grad_()
            w = torch.tensor([1.0, -2.0, 0.5, 3.0], requires_grad=True)
            parts = sum_of_ranks(x / 2, run.mesh.tensor, 1) if is_sharded else x * 1
            y = gather_all(write(parts, w))
            y.square().sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            values.append((y.detach(), x.grad * (2 if is_sharded else 1), w.grad))
        pairs = zip(*values, strict=True)
        found[write.__name__] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return found


def test_writes_and_gradients_are_those_of_the_full_tensor() -> None:
    for found in world.run(2, differences_by_write):
        assert max(found.values()) < 1e-5, found


def refused_writes() -> list[str]:
    run = shoal.init("tensor=2", announce=lambda _: None)
    said = []

    def entry_beside_view(x: Tensor) -> None:
        other = x.transpose(0, 1)
        x[:, 0] = 0.0
        other * 2

    def view_of_view(x: Tensor) -> None:
        other = x.transpose(0, 1)
        x.view(-1).add_(1.0)
        other * 2

    def shard_beside_view(x: Tensor) -> None:
        other = x.transpose(0, 1)
        first = other[0]
        x += 1
        first * 2

    for write in (entry_beside_view, view_of_view, shard_beside_view):
        with pytest.raises(StrategyRefused) as refusal:
            write(sum_of_ranks(torch.ones(3, 5, 4), run.mesh.tensor, 1))
        said.append(str(refusal.value))
    return said


def test_a_write_that_a_view_would_not_follow_is_refused() -> None:
    for said in world.run(2, refused_writes):
        assert all("writes into a tensor that lies in slices" in line for line in said)


def saved_shapes() -> set[tuple[int, ...]]:
    """Return shapes of tensors saved for the backward pass."""
    run, model = shoal.init("tensor=2,sequence=true", announce=lambda _: None), gpt()
    from torch.utils.data import DataLoader

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(tokens(), batch_size=10))
    saved = set()

    def pack(tensor: Tensor) -> Tensor:
        assert type(tensor) in (Tensor, torch.nn.Parameter)
        saved.add(tuple(tensor.shape))
        return tensor

    for x, _ in loader:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        break
    return saved


def test_between_blocks_a_rank_keeps_its_own_tokens_alone() -> None:
    for rank, saved in enumerate(world.run(2, saved_shapes)):
        assert (10, 13, 8) not in saved
        assert (10, 7 - rank, 8) in saved
