"""Runs whose workers were each at a step of their own, done again in one process: the same
bits, or a reason.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from tiny_jobs import DATA, GPT, MLP, tiny

from shoal import cli
from shoal.checkpoint import newest
from shoal.config.job import Job
from shoal.errors import CheckpointError, RecordError
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world
from shoal.train.async_replay import replay

STALE = "server=2,staleness=async,part_mb=0.0005"
REMEMBERING = {"model.name": "remembering", "data.name": "noisy", "checkpoint.every_epochs": 2}


def recorded(out: Path, *parts: dict[str, Any], strategy: str = STALE, **more: Any) -> Job:
    job = tiny(out, *parts, strategy=strategy, train__record=True, log__every=100, **more)
    return replace(job, plugins=(str(DATA), str(DATA.with_name("stateful_model.py"))))


def trains_unevenly(job: Job) -> int:
    """As a rank on a machine that has other things to do: now this one is late, now that one."""
    training = tiny_jobs.Undrawn(job)
    step = training._step

    def late(batch: Any, epochs: float) -> None:
        time.sleep(0.02 * ((training.step + training.run.rank) % 3))
        step(batch, epochs)

    training._step = late  # type: ignore[method-assign]
    tiny_jobs.go(training)
    return training.step


def trains_on_a_machine_of_its_own(job: Job) -> int:
    """As a rank that is alone on its machine."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return trains_unevenly(job)


def events(run: Path) -> Path:
    return next(run.glob("record/*/events.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        (GPT, STALE),
        ({**MLP, "train.accumulate": 2}, "server=2,staleness=2,part_mb=0.0005"),
        (REMEMBERING, STALE),
        ({**MLP, "checkpoint.asynchronous": True}, f"{STALE},compress=topk=0.1"),
    ],
    ids=["dropout", "staleness of 2, accumulated", "buffers", "compressed, saved beside"],
)
def test_a_run_of_three_workers_is_done_again_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any], strategy: str
) -> None:
    (steps, *_) = world.run(3, trains_unevenly, recorded(tmp_path, settings, strategy=strategy))
    before = torch.get_rng_state(), torch.get_num_threads()
    found = replay(tmp_path)
    assert (found.differing, found.first, found.last, found.pushes) == ([], 0, steps, 3 * steps)
    assert found.checkpoint == newest(tmp_path / "checkpoints")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


@pytest.mark.slow
def test_a_run_on_two_machines_is_done_again_on_one(tmp_path: Path) -> None:
    wide = {**MLP, "model.options.hidden": [200, 200]}  # between machines it is cut into more parts
    world.run(
        2,
        trains_on_a_machine_of_its_own,
        recorded(tmp_path, wide, strategy="server=1,staleness=async"),
    )
    assert replay(tmp_path).differing == []


@pytest.mark.slow
def test_a_run_that_was_resumed_is_done_again_from_there(tmp_path: Path) -> None:
    job = recorded(tmp_path, GPT)
    with world.start(3, tiny_jobs.is_signalled, job, 4) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 3
    stopped = replay(tmp_path)
    assert (stopped.differing, stopped.first) == ([], 0)
    world.run(3, trains_unevenly, job)
    found = replay(tmp_path)
    assert (found.differing, found.first, found.last) == ([], stopped.last, 12)


@pytest.mark.slow
def test_a_run_that_was_killed_is_done_again_up_to_its_last_checkpoint(tmp_path: Path) -> None:
    with world.start(
        3, tiny_jobs.is_signalled, recorded(tmp_path, MLP), 5, signal.SIGKILL
    ) as killed:
        killed.wait()
    found = replay(tmp_path)
    assert (found.differing, found.first, found.last) == ([], 0, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, not to be changed."""
    directory = tmp_path_factory.mktemp("recorded")
    world.run(2, trains_unevenly, recorded(directory, MLP))
    return directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_what_was_saved_before_a_gap_is_done_again(copy: Path) -> None:
    lines = events(copy).read_text().splitlines(keepends=True)
    index = next(
        i for i, line in enumerate(lines) if line[:2] == "[" + '"' and json.loads(line)[4] == 10
    )
    events(copy).write_text("".join(lines[:index] + lines[index + 1 :]))
    with pytest.raises(RecordError, match="--step N"):
        replay(copy)
    found = replay(copy, step=9)
    assert (found.differing, found.last, found.pushes) == ([], 9, 18)
    with pytest.raises(RecordError, match="no checkpoint of step 10"):
        replay(copy, step=10)


def test_a_line_that_is_no_note_is_named(copy: Path) -> None:
    events(copy).write_text("[1]\n" + events(copy).read_text())
    with pytest.raises(RecordError, match="line 1: '\\[1\\]' is no note"):
        replay(copy)


def test_half_a_line_at_the_end_is_left_aside(copy: Path) -> None:
    with events(copy).open("a") as file:
        file.write('["a",0,1')
    assert replay(copy).differing == []


def test_a_start_that_was_altered_is_refused(copy: Path) -> None:
    next(copy.glob("record/*/start/step-*/*.safetensors")).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="should have"):
        replay(copy)


def test_a_run_without_a_record_or_a_checkpoint_says_so(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RecordError, match="saved at steps 8, 9, 12"):
        replay(copy)
    shutil.rmtree(copy / "record")
    with pytest.raises(RecordError, match="--record"):
        replay(copy)


def test_other_bits_are_found_and_the_worst_tensor_is_named(copy: Path) -> None:
    config = next(copy.glob("record/*/config.yaml"))
    assert "seed: 0" in config.read_text()
    config.write_text(
        config.read_text().replace("seed: 0", "seed: 1")
    )  # other samples in every batch
    found = replay(copy)
    assert found.differing
    assert f"{found.differing[0][0]} differs by up to" in str(found)


def shoal(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_the_command_line_records_and_replays(tmp_path: Path) -> None:
    words = (
        "--strategy",
        "server=2,staleness=async",
        "--train.max_steps",
        4,
        "--out",
        tmp_path / "run",
    )
    trained = shoal("train", "digits", "-n", 2, "--record", *words)
    assert trained.returncode == 0, trained.stderr
    found = shoal("replay", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    assert "8 pushes of 2 workers, steps 0 to 4" in found.stdout
    assert "bit for bit" in found.stdout


@pytest.mark.parametrize(
    ("strategy", "why"), [("ddp", "no parameter servers"), ("server=2", "run it again")]
)
def test_what_needs_no_record_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str, why: str
) -> None:
    words = ["train", "digits", "--record", "--strategy", strategy, "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
