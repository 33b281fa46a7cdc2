"""metrics.jsonl: the measurements of a run, one JSON object a line, in the order of steps.

    {"kind": "train", "step": 20, "epoch": 1, "sample": 1280, "loss": 2.1, "top1": 31.2, "lr": 0.1,
     "samples_per_s": 812.0, "time_s": 1.6}
    {"kind": "validation", "step": 45, "epoch": 1, "loss": 1.2, "top1": 71.0, "top5": 96.5,
    "time_s": 3.9}

`step` counts optimizer steps and `epoch` counts epochs, both from 1. `sample` is the number of
samples of the epoch so far. Accuracies are in percent. A language task has `perplexity` instead of
`top1`. A number that is not finite is written as null, because JSON cannot express it.

A run that is resumed at step s removes the lines of later steps and writes them again. So its file
becomes equal to that of a run that was never stopped, except for the times.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.platform.ownership import open_own

NAME = "metrics.jsonl"
Record = Mapping[str, float | int]


class MetricsFile:
    """A metrics.jsonl that only ever changes by complete lines.

    Args:
        directory: of the run; directory and file are made if they do not exist.
        resume_step: lines of later steps are removed, and so is an incomplete last line.
        settings: are not written.

    Raises:
        OSError: here or in `write`. A line that does not fit on the disk is left out completely.
    """

    def __init__(
        self, directory: Path, resume_step: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(directory / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._file = io.FileIO(descriptor, "a+")  # unbuffered: what was written survives SIGKILL
        self._known = self._truncate_after(resume_step)

    def write(self, kind: str, record: Record) -> None:
        """Append a record, unless the file has one of this kind and step from before a resume."""
        if (kind, record["step"]) in self._known:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in record.items()}
        append(self._file, json.dumps({"kind": kind, **numbers}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _truncate_after(self, resume_step: int) -> set[tuple[str, int]]:
        """Remove lines after `resume_step`. Return (kind, step) of the records of that step.

        Steps never decrease in a file. So one truncation is enough, which is atomic and works on a
        full disk too.
        """
        known: set[tuple[str, int]] = set()
        position = 0
        end = 0
        last = b"\n"
        self._file.seek(0)
        for line in io.BufferedReader(io.FileIO(self._file.fileno(), closefd=False)):
            position += len(line)
            record = _parse(line)
            if record is None:
                continue
            if record["step"] > resume_step:
                break
            end = position
            last = line
            if record["step"] == resume_step:
                known.add((record["kind"], resume_step))
        self._file.truncate(end)
        if not last.endswith(b"\n"):
            append(self._file, b"\n")
        return known


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a metrics.jsonl, and the number of lines that a crash has damaged."""
    with path.open("rb") as file:
        records = [_parse(line) for line in file]
    readable = [record for record in records if record is not None]
    return readable, len(records) - len(readable)


def append(file: io.FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file. On OSError nothing of it stays in the file."""
    size = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = (
        isinstance(record, dict)
        and isinstance(record.get("step"), int)
        and isinstance(record.get("kind"), str)
    )
    return record if is_record else None
