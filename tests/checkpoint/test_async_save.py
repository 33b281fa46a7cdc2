"""Saving beside training: the same run to the last bit, and nothing is lost."""

import os
import re
import signal
import warnings
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tiny_jobs
import torch
import torch.distributed as dist
from tiny_jobs import EVERYTHING, GPT, MLP, assert_equal_to_the_bit, everything, tiny

from shoal.checkpoint import AsyncSaver, Checkpoints, tensor_files
from shoal.errors import CheckpointError, LaunchError
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

BESIDE = {"checkpoint.asynchronous": True, "checkpoint.every_steps": 1}
EVERY_STEP = {"checkpoint.every_steps": 1}
PIPED = "pipeline=2,cuts=blocks.0"


def same_run(folder: Path, ranks: int, *parts: dict[str, Any]) -> None:
    world.run(ranks, tiny_jobs.trains, tiny(folder / "waits", *parts, EVERY_STEP))
    world.run(ranks, tiny_jobs.trains, tiny(folder / "beside", *parts, BESIDE))
    assert_equal_to_the_bit(everything(folder / "beside"), everything(folder / "waits"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "part"),
    [(1, "single", EVERYTHING), (3, "zero3", MLP), (2, PIPED, GPT), (2, "ddp", GPT)],
    ids=["single", "zero3", "pipeline", "ddp"],
)
def test_a_run_that_saves_beside_training_is_the_same_run(
    tmp_path: Path, ranks: int, strategy: str, part: dict[str, Any]
) -> None:
    same_run(tmp_path, ranks, part, {"strategy": strategy})


@pytest.mark.slow
def test_a_stop_waits_for_the_save_that_is_under_way(tmp_path: Path) -> None:
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "undisturbed", GPT, EVERY_STEP))
    job = tiny(tmp_path / "run", GPT, BESIDE)
    with world.start(2, tiny_jobs.is_signalled, job, 5) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    world.run(2, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


class DiesBesideASave(tiny_jobs.Undrawn):
    """Is killed when a directory is there that a background save is writing."""

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step > 4 and self.saver.in_flight >= 0:
            while (
                not (aside := list(self.checkpoints.directory.glob("step-*.tmp")))
                and not self._is_there()
            ):
                pass
            if aside:
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_there(self) -> bool:
        return (self.checkpoints.directory / f"step-{self.saver.in_flight:08}").exists()


def dies(job: Any) -> None:
    tiny_jobs.go(DiesBesideASave(job))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "zero3"), (2, "ddp")])
def test_killed_beside_a_save_it_ends_bit_equal(tmp_path: Path, ranks: int, strategy: str) -> None:
    world.run(
        ranks, tiny_jobs.trains, tiny(tmp_path / "undisturbed", GPT, EVERY_STEP, strategy=strategy)
    )
    job = tiny(tmp_path / "run", GPT, BESIDE, strategy=strategy)
    with world.start(ranks, dies, job) as killed:
        codes = killed.wait()
    assert -signal.SIGKILL in codes
    world.run(ranks, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


def saves_where_there_is_no_room(folder: Path) -> list[str]:
    said = []
    saver = AsyncSaver(Checkpoints(folder / "a file" / "checkpoints"))
    for step in (1, 2):
        saver.start(step, {}, {}, {}, best=False)
        try:
            saver.wait()
        except CheckpointError as error:
            said.append(str(error))
    saver.close()
    return said


def test_a_save_that_failed_is_told_by_the_next_wait(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    said = saves_where_there_is_no_room(tmp_path)
    assert len(said) == 2
    assert "the checkpoint of step 1 was not saved" in said[0]


def has_no_memory_on_rank_1(folder: Path) -> list[str]:
    """Memory for a copy of 4 EiB is what no machine has."""
    said = []
    checkpoints = Checkpoints(folder, group=dist.new_group(backend="gloo"))
    saver = AsyncSaver(checkpoints)
    for step in (1, 2):
        size = 1 << 60 if step == 1 and dist.get_rank() == 1 else 3
        tensors = {"weight": torch.zeros(1).expand(3)}
        try:
            saver.start(step, tensors, {}, {"own": torch.zeros(1).expand(size)}, best=False)
            saver.wait()
        except CheckpointError as error:
            said.append(str(error))
    saver.close()
    return said


def test_where_one_rank_has_no_memory_for_its_copy_that_save_fails_on_all(tmp_path: Path) -> None:
    said = world.run(2, has_no_memory_on_rank_1, tmp_path / "checkpoints")
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert re.match(
        "step 1 was not saved, there is no copy of it:\n  rank 1: RuntimeError: .*memory",
        said[0][0],
    )
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


def holds_what_others_do_not(folder: Path) -> None:
    """Rank 1 has no `b`."""
    names = ["a", "b"] if dist.get_rank() == 0 else ["a"]
    saver = AsyncSaver(Checkpoints(folder, group=dist.new_group(backend="gloo")))
    saver.start(1, {name: torch.ones(3) for name in names}, {}, {}, best=False)
    saver.wait()
    saver.close()


def test_tensors_that_one_rank_alone_holds_are_not_left_out(tmp_path: Path) -> None:
    world.run(2, holds_what_others_do_not, tmp_path / "checkpoints")
    saved = Checkpoints(tmp_path / "checkpoints").load(pytest.fail)
    assert saved is not None
    assert {name: value.tolist() for name, value in saved.tensors.items()} == {
        "a": [1, 1, 1],
        "b": [1, 1, 1],
    }


def test_warning_filters_that_training_sets_while_a_save_goes_on_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, write = Event(), Event(), tensor_files.write

    def waits(*what: Any) -> Any:
        writing.set()
        assert go_on.wait(60)
        return write(*what)

    monkeypatch.setattr(tensor_files, "write", waits)
    saver = AsyncSaver(Checkpoints(tmp_path / "checkpoints"))
    saver.start(1, {"weight": torch.zeros(3)}, {}, {}, best=False)
    assert writing.wait(60)
    warnings.filterwarnings("ignore", message="what the user does not want to hear")
    go_on.set()
    saver.wait()
    saver.close()
    warnings.warn(
        "what the user does not want to hear", stacklevel=1
    )  # an error, were it not for the filter


class FailsBesideAFailingSave(tiny_jobs.Undrawn):
    """A save has no room, and then a step of one rank fails."""

    def _save(self, best: bool = False, must_succeed: bool = False) -> None:
        self.checkpoints.directory.touch()  # a file, where a directory is to be made
        super()._save(best, must_succeed)

    def _step(self, batch: Any, epochs: float) -> None:
        if self.step == 3 and self.run.rank == 1:
            raise ValueError("a mistake of the user's")
        super()._step(batch, epochs)


def fails_beside_a_failing_save(job: Any) -> None:
    tiny_jobs.go(FailsBesideAFailingSave(job))


def test_a_save_that_fails_while_training_ends_by_an_error_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tiny(
        tmp_path / "run", MLP, {"checkpoint.asynchronous": True, "checkpoint.every_steps": 3}
    )
    with pytest.raises(LaunchError, match="a mistake of the user's"):
        world.run(2, fails_beside_a_failing_save, job)
    assert capfd.readouterr().err.count("note: the checkpoint of step 3 was not saved") == 1
