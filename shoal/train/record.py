"""The record of an asynchronous run on the disk, from which `shoal replay` runs it again.

runs/digits/record/
  step-00000000/        one for each start of the run, named by its first step
    config.yaml         the job at that start
    start/              a checkpoint of that moment: weights, optimizer state, position in the
                        data, random states
    events.jsonl        events of parameter servers such as ["a", 3, 8, 0, 4] (see
                        shoal.parameter_server.node.event_log), and {"saved": 120} after each
                        checkpoint
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints, Saved, read_info, tensor_files
from shoal.checkpoint.manifest import name_of, step_of
from shoal.config import read, to_yaml
from shoal.config.job import Job
from shoal.errors import CheckpointError, RecordError, StrategyRefused
from shoal.parameter_server.node.event_log import Event
from shoal.run import Run
from shoal.strategies import NO_SERVERS

RECORD = "record"
CONFIG = "config.yaml"
START = "start"
EVENTS = "events.jsonl"


class Record:
    """Writes the record of a run from `step` on. Collective: make it before the first step.

    Raises:
        StrategyRefused: there are no parameter servers, or their steps are synchronous.
        CheckpointError: the start cannot be saved.
    """

    def __init__(self, job: Job, run: Run, step: int) -> None:
        if run.remote is None:
            raise StrategyRefused(f"{NO_SERVERS}; the strategy is {job.strategy}.")
        run.remote.record()
        self._remote = run.remote if run.rank == 0 else None
        directory = Path(job.directory) / RECORD / name_of(step)
        self._file = directory / EVENTS
        if run.rank == 0:
            # A start at the same step, which was killed before it saved anything.
            shutil.rmtree(directory, ignore_errors=True)
        tensors, info, private = run.state()
        # The number of ranks on a machine decides how the model is divided into partitions.
        local_world = run.mesh.place.local_world
        info |= {
            "step": step,
            "world": run.world_size,
            "local_world": local_world,
            **_circumstances(run.device),
        }
        Checkpoints(directory / START, keep=1).save(step, tensors, info, private)
        if run.rank == 0:
            (directory / CONFIG).write_text(to_yaml(job))
            self._file.write_text("")

    def save(self, step: int) -> None:
        """Append the events so far. Every rank calls it, after exactly `step` steps on all ranks.

        Raises:
            RecordError: on rank 0, if the file cannot be written. Later calls do nothing then.
        """
        if self._remote is None:
            return
        lines = [json.dumps(event, separators=(",", ":")) for event in self._remote.history()]
        try:
            with self._file.open("a") as file:
                file.write("\n".join([*lines, json.dumps({"saved": step}), ""]))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._remote = None
            raise RecordError(
                f"{self._file} cannot be written: {error.strerror}. The record ends here"
            ) from error


def _circumstances(device: torch.device) -> dict[str, Any]:
    """Return the properties of this machine on which the last bits of a run depend."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


@dataclass(frozen=True)
class ReplayStart:
    """The start of a recorded run.

    Attributes:
        step: steps that were taken before.
        tensors, info: as `Run.state` returned them.
        private: likewise, for each rank.
    """

    job: Job
    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    private: list[dict[str, Tensor]]
    path: Path

    @property
    def differing_circumstances(self) -> list[str]:
        """Sentences about properties of this machine that may change the last bits."""
        now = _circumstances(torch.device(self.info["device"]))
        return [
            f"{name} {self.info[name]} there, {now[name]} here"
            for name in ("torch", "processor")
            if self.info[name] != now[name]
        ]


def newest_start(run: Path) -> ReplayStart:
    """Return the start of the newest record of a run directory.

    Raises:
        RecordError: there is no record.
        CheckpointError: the checkpoint of its start is damaged.
    """
    directory = run / RECORD
    entries = directory.iterdir() if directory.is_dir() else ()
    records = sorted(
        path for path in entries if step_of(path.name) is not None and (path / EVENTS).is_file()
    )
    if not records:
        raise RecordError(
            f"{run} holds no record. It is made by `shoal train ... --record`, while the run "
            "trains."
        )
    path = records[-1]
    skipped: list[str] = []
    start, step = Checkpoints(path / START).choose(skipped.append)
    if start is None:
        reasons = "".join(f" {sentence}" for sentence in skipped)
        raise RecordError(
            f"{path / START} holds no checkpoint: nobody can tell how the run began.{reasons}"
        )
    info = read_info(start)
    tensors = tensor_files.read(start, lambda _: True)
    private = []
    for rank in range(int(info["world"])):
        names = [name for name in tensors if name.startswith(f"rank{rank}/")]
        private.append({name.partition("/")[2]: tensors.pop(name) for name in names})
    return ReplayStart(read(path / CONFIG).job, step, tensors, info, private, path)


def newest_saved(start: ReplayStart, checkpoints: Checkpoints, at_step: int | None) -> Saved:
    """Return the newest checkpoint that the record covers, or the one of step `at_step`.

    Raises: RecordError: it is not there any more, or the record is damaged.
    """
    steps = [line["saved"] for line in _lines(start.path / EVENTS) if isinstance(line, dict)]
    for step in reversed(steps):
        if at_step not in (None, step):
            continue
        try:
            saved = checkpoints.load(lambda _: None, step=step)
        except CheckpointError:  # it was pruned, or its save failed
            continue
        if saved is not None:
            return saved
    recorded = "nothing was saved since"
    if steps:
        recorded = f"it was saved at steps {', '.join(map(str, steps[-3:]))}"
    of_step = "" if at_step is None else f" of step {at_step}"
    raise RecordError(
        f"{start.path} leads to no checkpoint{of_step} that is still in {checkpoints.directory}: "
        f"{recorded}. A record is as good as its last save; see checkpoint.every_steps and "
        "checkpoint.keep."
    )


def events_until(start: ReplayStart, saved: int) -> list[Event]:
    """Return the events before the checkpoint of step `saved`. Raise RecordError without it."""
    events: list[Event] = []
    for line in _lines(start.path / EVENTS):
        if isinstance(line, list):
            events.append(Event(*line))
        elif line["saved"] == saved:
            return events
    raise RecordError(f"{start.path / EVENTS} does not go as far as step {saved}.")


def _lines(path: Path) -> Iterator[Any]:
    """Yield the complete lines. A kill may have left a part of one at the end."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                value = json.loads(line)
                is_valid = _is_event(value) or _is_save_marker(value)
            except ValueError:
                is_valid = False
            if not is_valid:
                raise RecordError(
                    f"{path}, line {number}: {line[:60].strip()!r} is no note of a parameter "
                    "server."
                )
            yield value


def _is_save_marker(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("saved"), int)


def _is_event(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(Event._fields):
        return False
    kind, *numbers = value
    if kind not in ("a", "r", "p"):
        return False
    return all(isinstance(number, int) and number >= 0 for number in numbers)
