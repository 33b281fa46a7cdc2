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
from contextlib import suppress
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
class RunRecord:
    """The newest record of a run.

    Attributes:
        step: steps that were taken before.
        tensors, info: at that moment, as `Run.state` returned them.
        private: likewise, for each rank.
        notes: the lines of the record: an Event, or the step of a save.
    """

    job: Job
    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    private: list[dict[str, Tensor]]
    path: Path
    notes: list[Event | int]

    @classmethod
    def newest(cls, run: Path) -> RunRecord:
        """Return the newest record of a run directory.

        Raises:
            RecordError: there is no record, or it is damaged.
            CheckpointError: the checkpoint of its start is damaged.
        """
        names = [file.parent.name for file in (run / RECORD).glob(f"*/{EVENTS}")]
        if not (names := [name for name in names if step_of(name) is not None]):
            raise RecordError(
                f"{run} holds no record. It is made by `shoal train ... --record`, while the run "
                "trains."
            )
        path = run / RECORD / max(names)
        skipped: list[str] = []
        start, step = Checkpoints(path / START).choose(skipped.append)
        if start is None:
            reasons = "".join(f" {sentence}" for sentence in skipped)
            raise RecordError(
                f"{path / START} holds no checkpoint: nobody can tell how the run began.{reasons}"
            )
        info = read_info(start)
        tensors = tensor_files.read(start, lambda _: True)
        private: list[dict[str, Tensor]] = []
        for rank in range(int(info["world"])):
            own = [name for name in tensors if name.startswith(f"rank{rank}/")]
            private.append({name.partition("/")[2]: tensors.pop(name) for name in own})
        file = path / EVENTS
        *lines, _ = file.read_text().split("\n")  # a kill may have left a part of one at the end
        notes = [_note(file, number, line) for number, line in enumerate(lines, start=1)]
        return cls(read(path / CONFIG).job, step, tensors, info, private, path, notes)

    @property
    def differing_circumstances(self) -> list[str]:
        """Sentences about properties of this machine that may change the last bits."""
        now = _circumstances(torch.device(self.info["device"]))
        return [
            f"{name} {self.info[name]} there, {now[name]} here"
            for name in ("torch", "processor")
            if self.info[name] != now[name]
        ]

    def newest_saved(self, checkpoints: Checkpoints, at_step: int | None) -> Saved:
        """Return the newest checkpoint that the record covers, or the one of step `at_step`.

        Raises: RecordError: it is not there any more.
        """
        steps = [note for note in self.notes if isinstance(note, int)]
        for step in reversed(steps):
            if at_step in (None, step):
                with suppress(CheckpointError):  # it was pruned, or its save failed
                    if saved := checkpoints.load(lambda _: None, step):
                        return saved
        recorded = "nothing was saved since"
        if steps:
            recorded = f"it was saved at steps {', '.join(map(str, steps[-3:]))}"
        of_step = "" if at_step is None else f" of step {at_step}"
        raise RecordError(
            f"{self.path} leads to no checkpoint{of_step} that is still in "
            f"{checkpoints.directory}: {recorded}. A record is as good as its last save; see "
            "checkpoint.every_steps and checkpoint.keep."
        )

    def events_until(self, saved: int) -> list[Event]:
        """Return the events before the save of a step."""
        before = self.notes[: self.notes.index(saved)]
        return [note for note in before if isinstance(note, Event)]


def _note(path: Path, number: int, line: str) -> Event | int:
    with suppress(ValueError, TypeError):
        match json.loads(line):
            case {"saved": int(step)}:
                return step
            case ["a" | "r" | "p" as kind, *numbers]:
                if all(isinstance(each, int) and each >= 0 for each in numbers):
                    return Event(kind, *numbers)
    raise RecordError(
        f"{path}, line {number}: {line[:60].strip()!r} is no note of a parameter server."
    )
