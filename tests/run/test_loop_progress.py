"""`run.progress(loader)` shows how far a loop is, on rank 0, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.run.loop_progress import LoopProgress
from shoal.testing import world


class Clock:
    """A clock that goes on by half a second whenever it is read."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += 0.5
        return self.time_s


def batches() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=4)


def test_a_loop_tells_its_steps_its_speed_and_the_loss_that_was_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logged: dict[str, float] = {}
    for number, (x,) in enumerate(LoopProgress(batches(), lambda: logged, Clock())):
        assert len(x) == (4, 4, 2)[number]
        logged["loss"] = 0.5 / (number + 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ") == ["step 1/3", "loss 0.5000"]
    assert lines[-1].startswith("step 3/3  loss 0.1667")
    assert lines[-1].endswith("samples/s")


def test_a_loop_without_an_end_and_a_second_loop_tell_their_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = LoopProgress(iter([torch.zeros(3)]), dict)
    assert len(list(progress)) == 1
    assert list(progress) == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step 1")
    assert "/" not in lines[1]
    assert lines[-1] == "step 0"


def test_a_bar_on_a_terminal_ends_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert len(list(LoopProgress(batches(), dict, Clock()))) == 3
    shown = terminal.getvalue()
    assert "━" * 10 in shown
    assert "╌" in shown
    assert shown.splitlines()[-1].split("step")[-1].startswith(" 3/3")


def trains(folder: Path) -> str:
    run = shoal.init(announce=str)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, batches())
    run.log_to("jsonl", directory=folder)
    shown, sys.stdout = sys.stdout, io.StringIO()
    try:
        for step, (x,) in enumerate(run.progress(loader)):
            loss = run.backward(model(x).square().mean())
            optimizer.step()
            run.log({"loss": loss}, step=step)
        return sys.stdout.getvalue()
    finally:
        sys.stdout = shown


def test_rank_0_shows_the_samples_of_all_ranks_and_the_others_nothing(tmp_path: Path) -> None:
    first, second = world.run(2, trains, tmp_path)
    assert second == ""
    assert first.splitlines()[-1].startswith("step 3/3  loss ")


@pytest.mark.parametrize("given", ["batches", 3, {"x": 1}])
def test_what_gives_no_batches_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"run\.progress takes a loader, and was given"):
        shoal.init(announce=str).progress(given)  # type: ignore[arg-type]
