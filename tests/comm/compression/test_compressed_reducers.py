"""Compressed means over ranks: results, residuals and sent bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import equal_chunks, pairwise_exchange
from shoal.comm.compression import parse_reducer
from shoal.comm.compression.base import BucketEntry
from shoal.comm.compression.error_feedback import AllGatherReducer, CompressedReducer
from shoal.comm.compression.powersgd import PowerSgd
from shoal.comm.compression.topk import TopK
from shoal.comm.deterministic import rank_order_mean
from shoal.errors import ConfigError
from shoal.testing import world
from tests.harness.in_turn import in_turn

SHAPES = {"matrix": (30, 20), "bias": (7,), "conv": (8, 3, 5)}
MEMBERS = [BucketEntry(name, torch.Size(shape)) for name, shape in SHAPES.items()]
COUNT = sum(member.count for member in MEMBERS)
WITH_MEMORY = ["topk=0.05", "onebit", "powersgd=2"]
NAMES = [member.name for member in MEMBERS]


def made(name: str) -> CompressedReducer:
    found = parse_reducer(name)
    assert found is not None
    return found


def gradient(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a gradient of this rank."""
    return torch.randn(
        COUNT, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()), dtype=dtype
    )


def is_equal_everywhere(tensor: Tensor) -> bool:
    first = tensor.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, tensor)


def arrives_and_waits(name: str) -> tuple[float, bool]:
    """Return the error of results plus residuals after six steps, and whether bits are equal."""
    reduction, equal = made(name), True
    arrived, given = (
        torch.zeros(COUNT, dtype=torch.float64),
        torch.zeros(COUNT, dtype=torch.float64),
    )
    for step in range(6):
        flat = gradient(step)
        given += rank_order_mean(flat.clone())
        reduction.mean(flat, MEMBERS, None)
        reduction.keep(NAMES)
        equal = equal and is_equal_everywhere(flat)
        arrived += flat
    kept = reduction.rank_state_dict()
    waits = [
        kept.get(f"left_out.{member.name}", torch.zeros(member.count)).double()
        for member in MEMBERS
    ]
    arrived += rank_order_mean(torch.cat(waits))
    return float((arrived - given).abs().max()), equal


def test_what_arrived_and_what_waits_are_the_sum_of_all_gradients() -> None:
    for results in world.run(3, in_turn, arrives_and_waits, *zip(WITH_MEMORY, strict=True)):
        for (difference, equal), name in zip(results, WITH_MEMORY, strict=True):
            assert difference < 1e-13, name
            assert equal, name


def with_everything(kind: str) -> float:
    reduction: CompressedReducer = AllGatherReducer(TopK(1.0)) if kind == "topk" else PowerSgd(20)
    flat = gradient(0)
    expected = rank_order_mean(flat.clone())
    reduction.mean(flat, MEMBERS, None)
    return float((flat - expected).abs().max())


def test_nothing_left_out_is_the_exact_mean() -> None:
    for by_topk, by_powersgd in world.run(3, in_turn, with_everything, ("topk",), ("powersgd",)):
        assert by_topk < 1e-14
        assert by_powersgd < 1e-14


def of_low_rank() -> float:
    """Two matrices of rank 1 each have a mean of rank 2."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    column, row = (torch.randn(n, generator=draws, dtype=torch.float64) for n in (30, 20))
    flat = torch.outer(column, row).flatten()
    expected = rank_order_mean(flat.clone())
    PowerSgd(2).mean(flat, MEMBERS[:1], None)
    return float((flat - expected).abs().max())


def test_a_mean_whose_rank_is_no_higher_arrives_whole_in_one_step() -> None:
    assert max(world.run(2, of_low_rank)) < 1e-12


def halved(name: str, dtype: torch.dtype) -> tuple[float, bool]:
    flat = gradient(0, dtype)
    expected = rank_order_mean(flat.to(torch.float64, copy=True))
    made(name).mean(flat, MEMBERS, None)
    return float((flat.double() - expected).abs().max()), is_equal_everywhere(flat)


def test_two_bytes_are_rounded_twice_and_the_same_for_all() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    calls = [(name, dtype) for name in ("bf16", "fp16") for dtype in dtypes]
    for results in world.run(3, in_turn, halved, *calls):
        for (difference, equal), call in zip(results, calls, strict=True):
            largest = 2**-7 if "bf16" in call or torch.bfloat16 in call else 2**-10
            assert 0 < difference < 4 * largest, call  # numbers are up to 4 in size
            assert equal, call


def after_one_that_is_not_finite(name: str) -> tuple[bool, bool]:
    """Return whether the result is not finite, and whether every memory is unchanged."""
    reduction = made(name)
    reduction.mean(gradient(0), MEMBERS, None)
    reduction.keep(NAMES)
    before = {key: value.clone() for key, value in reduction.rank_state_dict().items()}
    fine, spoiled = gradient(1), gradient(2)
    if dist.get_rank() == 1:
        spoiled[::50] = torch.nan
    reduction.mean(fine, [BucketEntry(f"other {m.name}", m.shape) for m in MEMBERS], None)
    reduction.mean(spoiled, MEMBERS, None)
    reduction.keep([*NAMES, *(f"other {name}" for name in NAMES)])
    after = reduction.rank_state_dict()
    same = after.keys() == before.keys() and all(
        torch.equal(after[key], value) for key, value in before.items()
    )
    return bool(fine.isfinite().all()) and not bool(spoiled.isfinite().all()), same


def test_a_step_that_is_not_finite_on_one_rank_changes_no_memory() -> None:
    calls = [(name,) for name in WITH_MEMORY]
    found = world.run(3, in_turn, after_one_that_is_not_finite, *calls)
    assert found == [[(True, True)] * len(calls)] * 3


def unused() -> bool:
    reduction = made("onebit")
    reduction.mean(gradient(0), MEMBERS, None)
    reduction.keep(NAMES)
    before = reduction.rank_state_dict()["left_out.bias"].clone()
    reduction.mean(gradient(1), MEMBERS, None)
    reduction.keep(["matrix", "conv"])
    return torch.equal(reduction.rank_state_dict()["left_out.bias"], before)


def test_a_parameter_that_nobody_used_keeps_what_waits() -> None:
    assert all(world.run(2, unused))


class Counting:
    """Count the bytes that this rank sends to others."""

    def __init__(self) -> None:
        self.sent_bytes, self._send = 0, equal_chunks.send

    def send(self, gloo: Any, tensor: Tensor, target: int) -> Any:
        self.sent_bytes += tensor.nbytes
        return self._send(gloo, tensor, target)


def counted(names: list[str], dtype: torch.dtype) -> dict[str, int]:
    """Return the sent bytes."""
    group, counting = dist.new_group(backend="gloo"), Counting()
    equal_chunks.send = pairwise_exchange.send = counting.send
    found = {}
    for name in names:
        counting.sent_bytes, reduction = 0, parse_reducer(name)
        if reduction is None:
            rank_order_mean(gradient(0, dtype), group)
        else:
            reduction.mean(gradient(0, dtype), MEMBERS, group)
        found[name] = counting.sent_bytes
    return found


def documented(name: str, dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes that docs/strategies/fewer-bytes.md gives, in equal shares."""
    share = -(-COUNT // ranks)
    if name == "none":
        return 2 * (ranks - 1) * share * dtype.itemsize
    if name in ("bf16", "fp16"):
        return 2 * (ranks - 1) * (2 * share + 4 * (name == "fp16"))
    if name == "powersgd=2":
        means = 2 * (30 + 8) + 7, 2 * (20 + 15)  # P and the bias, Q
        return sum(2 * (ranks - 1) * -(-count // ranks) * dtype.itemsize for count in means)
    reduction = made(name)
    assert isinstance(reduction, AllGatherReducer)
    sizes = (reduction.compression.size_bytes(member.count, dtype) for member in MEMBERS)
    return (ranks - 1) * sum(sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_many_bytes_are_sent_as_is_documented(dtype: torch.dtype) -> None:
    ranks = 3
    for figures in world.run(ranks, counted, ["none", "bf16", "fp16", *WITH_MEMORY], dtype):
        for name, found in figures.items():
            said = documented(name, dtype, ranks)
            # The last share of an uncompressed mean may be shorter.
            spare = 2 * ranks**2 * dtype.itemsize if name in ("none", "powersgd=2") else 0
            assert said - spare <= found <= said > 0, name


@pytest.mark.parametrize(
    "text", ["powersgd", "powersgd=0", "powersgd=x", "power", "topk=0.9", "bf16=2"]
)
def test_what_is_no_compression_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="compression"):
        parse_reducer(text)


def test_a_memory_comes_back_whatever_else_is_there() -> None:
    first, second = PowerSgd(2), PowerSgd(2)
    first.saved = {
        "left_out.": {"matrix": torch.ones(600)},
        "guess.": {"matrix": torch.ones(20, 2)},
    }
    second.load({**first.rank_state_dict(), "torch": torch.zeros(3)})
    assert second.rank_state_dict().keys() == first.rank_state_dict().keys()
    other = PowerSgd(3)
    other.load(first.rank_state_dict())
    assert other.rank_state_dict().keys() == {"left_out.matrix"}  # the guess is of another rank
