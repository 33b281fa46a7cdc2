"""Ranks that leave a loop or a step by a number of their own are named, with their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import shoal
from shoal.errors import LaunchError, ShoalError
from shoal.run.collective_calls import LoopPlace, place_in
from shoal.testing import world
from tests.harness.in_turn import in_turn


def error_of(loop: Callable[[], object]) -> str:
    try:
        loop()
    except ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def prepared(strategy: str, samples: int) -> tuple[shoal.Run, nn.Module, Any, DataLoader]:
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    data = TensorDataset(torch.randn(samples, 6).double(), torch.arange(samples) % 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return run, *run.prepare(model, optimizer, DataLoader(data, batch_size=8))


def end_of_loop(strategy: str, leaves: str) -> str:
    """Train with a loop that rank 1 leaves in its own way. Returns the error that ends it."""
    run, model, optimizer, loader = prepared(strategy, 32)
    own = float(run.rank == 1)
    if leaves == "by the mean":
        own = run.gather(torch.tensor([own])).mean().item()

    def loop() -> None:
        for step, (x, y) in enumerate(loader):
            if step == 3 and own == 1 and leaves == "break":
                break
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if step == 1 and own == 1 and leaves == "continue":
                continue
            optimizer.step()
            if step == 2 and own == 1 and leaves == "fail":
                raise KeyError("of the script")
        if leaves == "break":
            run.weights()

    return error_of(loop)


def test_a_rank_that_breaks_is_named_with_its_place_and_that_of_the_others() -> None:
    for text in world.run(2, end_of_loop, "ddp", "break"):
        assert text.startswith("UsageError: the ranks do not make the same calls")
        assert "rank 0 is in call 4 of run.forward_backward (test_loop_position.py:" in text
        assert "rank 1 is in run.weights (test_loop_position.py:" in text
        assert "after 3 steps" in text
        assert "run.gather(torch.tensor([value])).mean()" in text


def saves_on_rank_1(strategy: str) -> None:
    """Train by losses of the loop, of which rank 1 keeps the weights once."""
    run, model, optimizer, loader = prepared(strategy, 32)
    for step, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        run.backward(model(x).sin().mean())
        optimizer.step()
        if step == 2 and run.rank == 1:
            run.save("best.pt")


def saves_its_best(strategy: str) -> str:
    return error_of(lambda: saves_on_rank_1(strategy))


def test_a_rank_that_saves_alone_is_named_where_losses_are_those_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for texts in world.run(2, in_turn, saves_its_best, ("ddp",), ("server=1",)):
        for text in texts:
            assert "rank 0 is in call 4 of run.backward (test_loop_position.py:" in text
            assert "rank 1 is in run.save (test_loop_position.py:" in text
            assert "All ranks call run.save, and none behind `if run.rank == 0`" in text


def test_a_rank_that_saves_alone_is_named_where_a_model_gathers_what_it_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as caught:
        world.run(2, saves_on_rank_1, "zero3")
    text = str(caught.value)
    assert "rank 0 is in a pass of a model, after 3 steps, and rank 1 is in run.save (test_" in text


def test_a_rank_that_leaves_out_a_step_of_the_optimizer_is_named() -> None:
    for text in world.run(2, end_of_loop, "ddp", "continue"):
        assert "rank 0 is in optimizer.step() (test_loop_position.py:" in text
        assert "rank 1 is in call 3 of run.forward_backward" in text


def other_batches(strategy: str, batches: dict[int, set[int]], act: str) -> str:
    """Train while each rank leaves out batches of its own, or changes their samples, as by chance.
    Returns the error.
    """
    run, model, optimizer, loader = prepared(strategy, 80)

    def loop() -> None:
        for step, (x, y) in enumerate(loader):
            if step in batches[run.rank]:
                if act == "leave out":
                    continue
                x = -x
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            optimizer.zero_grad()

    return error_of(loop)


def test_a_rank_that_leaves_out_a_batch_is_named_before_the_optimizer_steps() -> None:
    calls = [(strategy, {0: set(), 1: {2}}, "leave out") for strategy in ("ddp", "tensor=2")]
    here = "UsageError: rank 0 computes a step on the batch that ends at 32"
    there = "and rank 1 on the one that ends at 40 of epoch 0 (test_loop_position.py:"
    for texts in world.run(2, in_turn, other_batches, *calls):
        for text in texts:
            assert text.startswith(here)
            assert there in text
            assert "run.gather(torch.tensor([value])).mean()" in text


def test_ranks_that_have_left_out_as_many_batches_are_told_too() -> None:
    for text in world.run(2, other_batches, "ddp", {0: {4}, 1: {5}}, "leave out"):
        assert "ranks 0 and 1 have computed steps on different batches" in text


def test_batches_that_all_leave_out_and_samples_made_anew_are_no_other_batches() -> None:
    left_out = ("ddp", {0: {2, 5}, 1: {2, 5}}, "leave out")
    changed = ("ddp", {0: {1, 2}, 1: {2, 3}}, "change")
    assert world.run(2, in_turn, other_batches, left_out, changed) == [["", ""]] * 2


class OwnWeights(Sampler[int]):
    """Draws by weights that the loop writes, as prioritised replay and hard-example mining do."""

    def __init__(self, count: int) -> None:
        self.weights = torch.ones(count)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, len(self.weights), replacement=True).tolist())

    def __len__(self) -> int:
        return len(self.weights)


def weighted_by_losses(strategy: str, of_all: bool) -> tuple[str, list[Tensor]]:
    """Draw samples by losses, of this rank or of all. Returns the error, or the weights."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    data = TensorDataset(torch.randn(40, 6).double(), torch.arange(40) % 4, torch.arange(40))
    sampler = OwnWeights(40)
    model, optimizer, loader = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(data, batch_size=10, sampler=sampler),
    )
    try:
        for _ in range(3):
            for x, y, index in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                run.backward(losses.mean())
                optimizer.step()
                optimizer.zero_grad()
                gather = run.gather if of_all else Tensor.detach
                sampler.weights[gather(index)] = gather(losses.detach()).float()
    except ShoalError as error:
        return f"{type(error).__name__}: {error}", []
    return "", [*run.weights().values()]


def test_a_sampler_that_draws_by_losses_of_a_rank_is_refused() -> None:
    refused = "UsageError: the samplers of ranks 0 and 1 have drawn other samples"
    for results in world.run(2, in_turn, weighted_by_losses, ("ddp", False), ("zero1", False)):
        for text, _ in results:
            assert text.startswith(refused)
            assert "sampler.weights[run.gather(index)] = run.gather(losses" in text


def test_a_sampler_that_draws_by_losses_of_all_samples_trains_as_on_one_device() -> None:
    _, alone = weighted_by_losses("ddp", True)
    for text, weights in world.run(2, weighted_by_losses, "ddp", True):
        assert not text
        torch.testing.assert_close(weights, alone, rtol=1e-10, atol=1e-12)


def ends_early() -> str:
    run = shoal.init(announce=lambda _: None)
    model = nn.Linear(6, 4)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(6):
        if step == 3 and run.rank == 1:
            raise SystemExit(0)
        run.forward_backward(lambda x: model(x).square().mean(), torch.ones(4, 6) + run.rank)
        optimizer.step()
    return ""


def test_a_rank_whose_program_ends_is_named_with_its_steps() -> None:
    with pytest.raises(LaunchError, match="rank 1 has ended after 3 steps") as caught:
        world.run(2, ends_early)
    assert "rank 0 is in call 4 of run.forward_backward" in str(caught.value)


def test_an_error_of_a_script_is_no_end_of_its_program() -> None:
    with pytest.raises(LaunchError, match="KeyError: 'of the script'"):
        world.run(2, end_of_loop, "ddp", "fail")


def test_ranks_that_decide_by_the_mean_of_all_go_on() -> None:
    assert world.run(2, end_of_loop, "ddp", "by the mean") == ["", ""]


@pytest.mark.parametrize(
    "entry", [b"", b"\xff\x1b[2J", b"7", b"[1]", b'["a", "b", "c"]', b"[" * 9999]
)
def test_what_a_stranger_writes_in_place_of_a_rank_is_no_place(entry: bytes) -> None:
    assert place_in(entry) is None


def test_a_place_has_no_control_characters() -> None:
    assert place_in(b'["run.save", 3, "a\\u001b[2J.py:1"]') == LoopPlace(
        "run.save", 3, "a\\x1b[2J.py:1"
    )
