"""Models in the shapes that training scripts give them are divided, and train as on one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from script_shaped_models import (
    LENGTH,
    WORDS,
    InterleavedGPT,
    Learner,
    LecturesGPT,
    MadeInForward,
    ScriptGPT,
    SlicedSequential,
    TurnedGPT,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.norm import full_tensor
from shoal.errors import StrategyRefused
from shoal.strategies.tensor.strategy import TensorParallel, tensor_plan
from shoal.testing import world

LossOf = Callable[[nn.Module, Tensor, Tensor], Any]


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, WORDS, (12, LENGTH), generator=generator) for _ in range(2))
    y[:2, 3:] = -1
    return TensorDataset(x, y)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (12,), generator=generator))


def train(
    strategy: str, make: Callable[[], nn.Module], data: TensorDataset, loss_of: LossOf
) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Return the losses of two steps, the full weights after them, and the model."""
    run = shoal.init(strategy, precision="fp64", seed=0, announce=lambda _: None)
    torch.manual_seed(3)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=6))
    losses = []
    for x, y in loader:
        losses.append(float(run.forward_backward(partial(loss_of, model), x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: full_tensor(p) for name, p in model.named_parameters()}, model


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert other[0] == pytest.approx(one[0], rel=1e-10)
    for name, weight in one[1].items():
        torch.testing.assert_close(other[1][name], weight, rtol=1e-10, atol=1e-12, msg=name)


def loss_inside(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Return the loss that the model computes, as a sum over tokens and their number."""
    _, loss = model(x, targets=y)
    count = (y != -1).sum()
    return shoal.counted(loss * count, count)


def loss_of_logits(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    logits = logits[0] if isinstance(logits, tuple) else logits
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
    return shoal.counted(total, (y != -1).sum())


MODELS: dict[str, tuple[Callable[[], nn.Module], LossOf]] = {
    "tied, torch's attention": (ScriptGPT, loss_inside),
    "tied, dropout": (partial(ScriptGPT, 0.2), loss_inside),
    "untied, mask in a buffer, dropout": (partial(ScriptGPT, 0.2, True), loss_inside),
    "key, query, value": (LecturesGPT, loss_of_logits),
    "turned positions, few heads of keys": (TurnedGPT, loss_of_logits),
    "each head's query, key and value together": (InterleavedGPT, loss_of_logits),
}


def train_all(strategy: str) -> dict[str, tuple[list[float], dict[str, Tensor], list[str]]]:
    """Train each model, and name the attention that every rank computes whole."""
    found = {}
    for name, (make, loss_of) in MODELS.items():
        losses, weights, model = train(strategy, make, words(), loss_of)
        regions = {n: getattr(m, "forward", None) for n, m in model.named_modules()}
        whole = [
            name
            for name, region in regions.items()
            if getattr(region, "chosen", {}).get(True, (1, 1))[0] is None
        ]
        found[name] = (losses, weights, whole)
    return found


CUT_IN_HEADS = {name for name, (make, _) in MODELS.items() if make in (TurnedGPT, InterleavedGPT)}
"""The others take the width of a head from their input."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*every rank gathers and computes all of it")
def test_attention_of_scripts_trains_as_on_one_device_in_heads_or_whole() -> None:
    single = train_all("single")
    for found in world.run(2, train_all, "tensor=2"):
        for name in MODELS:
            assert_same(single[name], found[name])
            assert (found[name][2] == []) == (name in CUT_IN_HEADS), name


def styles(model: nn.Module) -> dict[str, str]:
    return tensor_plan(model, TensorParallel(2)).parallel_styles()


@pytest.mark.parametrize("old", [False, True])
def test_the_plan_of_a_script_names_heads_hidden_units_and_words(old: bool) -> None:
    found = styles(ScriptGPT(old=old))
    assert found["transformer.h.1.attn.c_attn"] == "column, by heads"
    assert found["transformer.h.0.mlp.c_proj"] == "row"
    assert found["lm_head"] == found["transformer.wte"] == "vocabulary"


@pytest.mark.limit(60)
def test_modules_that_a_forward_pass_makes_end_no_trace_for_ever() -> None:
    model = SlicedSequential()
    assert styles(model) == {"net.0": "column", "net.2": "row"}
    assert (model.calls, model.seen, float(model.passes)) == (0, [], 0.0)
    assert styles(MadeInForward()) == {"last.0": "column", "last.2": "row"}


def test_modules_under_two_names_are_left_whole() -> None:
    with pytest.raises(
        StrategyRefused, match=r"net\.0: its parameters, or itself, are used in sev"
    ):
        styles(Learner())


def train_sliced(strategy: str) -> tuple[Any, ...]:
    loss = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
    losses, weights, model = train(strategy, SlicedSequential, rows(), loss)
    return losses, weights, model.calls, float(model.passes)


@pytest.mark.slow
def test_a_slice_of_a_sequential_trains_as_on_one_device_and_counts_its_own_passes() -> None:
    single = train_sliced("single")
    assert single[2:] == (2, 2.0)
    for found in world.run(2, train_sliced, "tensor=2"):
        assert_same(single, found)
        assert found[2:] == single[2:]
