"""Loggers with the real packages, offline; each is read back by its own package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import shoal
from shoal.errors import UsageError
from shoal.loggers import LoggerGroup, open_logger
from shoal.loggers.metrics_file import MetricsFile, Record
from shoal.platform.optional_packages import is_installed
from shoal.testing import world


def write_and_resume(name: str, directory: Path) -> None:
    """Write steps 1 to 3, and in a second run 3 to 5."""
    for steps, begin in ((range(1, 4), 0), (range(3, 6), 2)):
        logger = open_logger(name, directory, begin, {"optimizer.lr": 0.1})
        for step in steps:
            logger.write("train", {"step": step, "loss": 1 / step, "lr": 0.1})
        logger.write("validation", {"step": steps[-1], "loss": 2.0})
        logger.close()


def in_a_child(name: str, folder: Path, look: str = "", **variables: str) -> str:
    """Write with a logger in a process of its own, whose home and temporary files are in a folder.

    Args: look: statements that read the record back, and print what they have found.

    Returns: what they have printed.
    """
    if not is_installed(name):
        pytest.skip("pip install shoal[loggers]")
    program = (
        "import pathlib, sys, test_loggers\n"
        f"test_loggers.write_and_resume({name!r}, pathlib.Path(sys.argv[1]) / 'run')\n{look}"
    )
    places = dict.fromkeys(("HOME", "TMPDIR", "TRACKIO_DIR"), str(folder))
    path = f"{Path(__file__).parent}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **places, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return next((x[6:] for x in done.stdout.splitlines() if x.startswith("found ")), "")


STEPS = {step: 1 / step for step in range(1, 6)}


def test_mlflow_has_one_run_with_each_step(tmp_path: Path) -> None:
    look = """
import mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("shoal")
(run,) = client.search_runs([experiment.experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
print("found", ({m.step: m.value for m in history}, run.data.params, run.info.status))
"""
    store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    found = in_a_child("mlflow", tmp_path, look, **store)
    assert ast.literal_eval(found) == (STEPS, {"optimizer.lr": "0.1"}, "FINISHED")


def test_trackio_has_one_run_with_each_step(tmp_path: Path) -> None:
    look = """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("shoal")
logs = SQLiteStorage.get_logs("shoal", name)
print("found", {each["step"]: each["train/loss"] for each in logs if "train/loss" in each})
"""
    assert ast.literal_eval(in_a_child("trackio", tmp_path, look)) == pytest.approx(STEPS)


def test_wandb_keeps_one_run_offline(tmp_path: Path) -> None:
    in_a_child("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {file.stem for file in files} == {f"run-{(tmp_path / 'run/wandb.id').read_text()}"}
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_an_unknown_logger_is_refused_with_a_near_one() -> None:
    with pytest.raises(UsageError, match="wandb"):
        open_logger("wandbb", Path("unused"), 0, {})


def logs(directory: Path) -> list[dict[str, float]]:
    run = shoal.init("ddp", announce=lambda _: None)
    run.log_to("jsonl", directory=directory, lr=0.1)
    loss = torch.tensor(float(run.rank))
    found = [run.log({"loss": loss, "lr": 0.1}, step=step) for step in (1, 2)]
    with pytest.raises(UsageError, match="loss is no single number: \\(2,\\)"):
        run.log({"loss": torch.zeros(2)}, step=3)
    return found


def test_a_script_logs_the_means_of_all_ranks_on_one(tmp_path: Path) -> None:
    for found in world.run(2, logs, tmp_path):
        assert found == [{"loss": 0.5, "lr": 0.1}] * 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"kind": "train", "step": step, "loss": 0.5, "lr": 0.1} for step in (1, 2)]


def resumes(directory: Path, step: int) -> str:
    run = shoal.init("ddp", announce=lambda _: None)
    with pytest.raises(UsageError) as refused:
        run.log_to("jsonl", directory=directory)
    run.log_to("jsonl", directory=directory, step=step)
    run.log({"loss": 5.0}, step=step + 1)
    return str(refused.value)


@pytest.mark.parametrize(("step", "kept"), [(1, [(1, 0.5), (2, 5.0)]), (0, [(1, 5.0)])])
def test_an_earlier_record_is_kept_up_to_the_step_from_which_a_script_goes_on(
    tmp_path: Path, step: int, kept: list[tuple[int, float]]
) -> None:
    world.run(2, logs, tmp_path)
    for refused in world.run(2, resumes, tmp_path, step):
        assert "measurements of another run (metrics.jsonl)" in refused
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == kept


class Derived(torch.optim.SGD):
    """An optimizer whose step calls that of its base class, which torch hooks too."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def counts(directory: Path, stops: int) -> None:
    """Train two optimizers until a step of the first one, or on from there; say no step."""
    run = shoal.init("zero1", announce=lambda _: None)
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    torch.optim.SGD(first.parameters())  # after this its step is hooked
    made = [Derived(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]
    loader: Any = DataLoader(torch.ones(12, 2), batch_size=2)
    first, second, *made, loader = run.prepare(first, second, *made, loader)
    checkpoint = run.checkpoint(directory / "checkpoints")
    run.log_to("jsonl", directory=directory, step=checkpoint.resume())
    for x in loader:
        loss = run.backward(first(x).square().mean() + second(x).square().mean())
        for optimizer in (*made, made[1]):
            optimizer.step()
        run.log({"loss": loss})
        if run._prepared.optimizer_steps == stops:
            checkpoint.save(stops)
            return


def test_a_record_without_a_step_is_of_the_last_step_also_of_a_run_that_goes_on(
    tmp_path: Path,
) -> None:
    for ranks, stops in ((2, 4), (1, 0)):
        world.run(ranks, counts, tmp_path, stops)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


class LosesAll:
    """A logger of a program that cannot be reached."""

    def write(self, kind: str, record: Record) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise RuntimeError("never opened")


def test_a_logger_that_loses_records_is_noted_once_and_the_others_go_on(tmp_path: Path) -> None:
    notes: list[str] = []
    group = LoggerGroup(notes.append)
    group.loggers += [LosesAll(), MetricsFile(tmp_path, 0)]
    for step in (1, 2):
        group.write("train", {"step": step, "loss": 0.5})
    group.close()
    assert notes == [
        "LosesAll is losing records; training goes on: ConnectionError: no route to host"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_script_without_a_logger_is_told_where_to_log() -> None:
    run = shoal.init(announce=lambda _: None)
    with pytest.raises(UsageError, match=r'run\.log_to\("jsonl"\)'):
        run.log({"loss": 1.0})
