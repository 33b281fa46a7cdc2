"""What `shoal replay` needs of a run, on the disk: how it began, and what its parameter servers
noted since.

runs/digits/record/
  step-00000000/        one for each time the run was started, by the step that it began with
    config.yaml         the job as it was then
    start/              a checkpoint of that moment: weights, optimizer state, where the data stands, random states
    events.jsonl        ["a", 3, 8, 0, 4] and the like (see shoal.parameter_server.node.event_log); {"saved": 120} after each checkpoint
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

from shoal.config import read, to_yaml
from shoal.config.job import Job
from shoal.errors import RecordError, StrategyRefused
from shoal.parameter_server.node.event_log import Event
from shoal.run import Run
from shoal.strategies import NO_SERVERS
from shoal.train.checkpoint import Checkpoints, read_info, tensor_files
from shoal.train.checkpoint.manifest import name_of, step_of

RECORD, CONFIG, START, EVENTS = "record", "config.yaml", "start", "events.jsonl"


class Record:
    """The record of a run that begins at `step`, being written. Made by all ranks, before the first
    step. Collective.

    Raises:
        StrategyRefused: there are no servers, or their steps are synchronous.
        CheckpointError: the start cannot be saved.
    """

    def __init__(self, job: Job, run: Run, step: int) -> None:
        if run.remote is None:
            raise StrategyRefused(f"{NO_SERVERS}; the strategy is {job.strategy}.")
        run.remote.record()
        self._remote = run.remote if run.rank == 0 else None
        directory = Path(job.directory) / RECORD / name_of(step)
        self._file = directory / EVENTS
        if run.rank == 0:  # an attempt that was killed before it saved anything
            shutil.rmtree(directory, ignore_errors=True)
        tensors, info, private = run.state()
        here = run.mesh.place.local_world  # on it depends how the model is cut
        info |= {
            "step": step,
            "world": run.world,
            "local_world": here,
            **_circumstances(run.device),
        }
        Checkpoints(directory / START, keep=1).save(step, tensors, info, private)
        if run.rank == 0:
            (directory / CONFIG).write_text(to_yaml(job))
            self._file.write_text("")

    def save(self, step: int) -> None:
        """Keep what the servers have noted so far. Every rank calls it when all have taken `step`
        steps, no more.

        Raises: RecordError: on rank 0, if the file cannot be written; nothing can be added to it
        any more."""
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
    """What the last bits depend on besides the job."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


@dataclass(frozen=True)
class ReplayStart:
    """How a recorded run began.

    Attributes:
        step: steps that were taken before.
        tensors, info: as `Run.state` gave them; private: likewise, of each rank.
    """

    job: Job
    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    private: list[dict[str, Tensor]]
    path: Path

    @property
    def differing_circumstances(self) -> list[str]:
        """What is not here as it was there, and may change the last bits."""
        here = _circumstances(torch.device(self.info["device"]))
        pairs = ((name, self.info[name], here[name]) for name in ("torch", "processor"))
        return [f"{name} {there} there, {now} here" for name, there, now in pairs if there != now]


def newest_start(run: Path) -> ReplayStart:
    """The newest record of a run directory. Raises RecordError: there is none. CheckpointError:
    it is damaged.
    """
    directory = run / RECORD
    found = (
        [path for path in directory.iterdir() if step_of(path.name) is not None]
        if directory.is_dir()
        else []
    )
    begun = sorted(path for path in found if (path / EVENTS).is_file())
    if not begun:
        raise RecordError(
            f"{run} holds no record. It is made by `shoal train ... --record`, while the run "
            "trains."
        )
    path = begun[-1]
    skipped: list[str] = []
    start, step = Checkpoints(path / START).choose(skipped.append)
    if start is None:
        why = "".join(f" {sentence}" for sentence in skipped)
        raise RecordError(
            f"{path / START} holds no checkpoint: nobody can tell how the run began.{why}"
        )
    info = read_info(start)
    everything = tensor_files.read(start, lambda _: True)
    private = []
    for rank in range(int(info["world"])):
        mine = [name for name in everything if name.startswith(f"rank{rank}/")]
        private.append({name.partition("/")[2]: everything.pop(name) for name in mine})
    return ReplayStart(read(path / CONFIG).job, step, everything, info, private, path)


def saved_steps(start: ReplayStart) -> list[int]:
    """The steps of the run up to which the record goes, one for each checkpoint. Raises
    RecordError.
    """
    return [line["saved"] for line in _lines(start.path / EVENTS) if isinstance(line, dict)]


def events_until(start: ReplayStart, saved: int) -> list[Event]:
    """What was noted before the checkpoint of step `saved`. Raises RecordError."""
    events: list[Event] = []
    for line in _lines(start.path / EVENTS):
        if isinstance(line, list):
            events.append(Event(*line))
        elif line["saved"] == saved:
            return events
    raise RecordError(f"{start.path / EVENTS} does not go as far as step {saved}.")


def _lines(path: Path) -> Iterator[Any]:
    """Whole lines; a kill may have left half of one at the end."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                found = json.loads(line)
                ok = _is_event(found) or _is_save_marker(found)
            except ValueError:
                ok = False
            if not ok:
                raise RecordError(
                    f"{path}, line {number}: {line[:60].strip()!r} is no note of a parameter "
                    "server."
                )
            yield found


def _is_save_marker(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("saved"), int)


def _is_event(found: Any) -> bool:
    if (
        not isinstance(found, list)
        or len(found) != len(Event._fields)
        or found[0] not in ("a", "r", "p")
    ):
        return False
    return all(isinstance(number, int) and number >= 0 for number in found[1:])
