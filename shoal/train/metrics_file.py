"""metrics.jsonl: what a run measured, one JSON object a line, in the order of steps, never
buffered.

    {"kind": "train", "step": 20, "epoch": 1, "sample": 1280, "loss": 2.1, "top1": 31.2, "lr": 0.1,
     "samples_per_s": 812.0, "time_s": 1.6}
    {"kind": "validation", "step": 45, "epoch": 1, "loss": 1.2, "top1": 71.0, "top5": 96.5,
    "time_s": 3.9}

`step` counts optimizer steps and `epoch` epochs, both from 1; `sample` is how many samples of the
epoch were seen. Accuracies are in percent. A language task has `perplexity` where a classification
has `top1`. A number that is not finite is written as null, for JSON has no word for it.

A run that is resumed at step s takes back the lines of later steps, which it will write again: its
file ends up equal to that of a run that was never stopped, but for the times."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
Record = Mapping[str, float | int]


class MetricsFile:
    """A metrics.jsonl that is only ever cut or appended to in whole lines.

    Args: path: the file; made if it is not there. resume_step: last step that counts; what is there
        about later ones is cut off, and so is a torn end.

    Raises: OSError: from here or from `write`; a line that did not fit on the disk is left out as a
        whole.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._file = io.FileIO(path, "a+")  # unbuffered: what was written survives SIGKILL
        self._known = self._truncate_after(resume_step)

    def write(self, kind: str, record: Record) -> None:
        """Appends a record; one about the step of the resume that is there already is not
        written twice.
        """
        if (kind, record["step"]) in self._known:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in record.items()}
        append(self._file, json.dumps({"kind": kind, **numbers}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _truncate_after(self, resume_step: int) -> set[tuple[str, int]]:
        """Cuts off what does not count and returns which records there are about `resume_step`
        itself.

        Steps never decrease in a file, hence one truncation does it: atomic, and possible on a full
        disk."""
        known: set[tuple[str, int]] = set()
        position, end, last = 0, 0, b"\n"
        self._file.seek(0)
        for line in io.BufferedReader(io.FileIO(self._file.fileno(), closefd=False)):
            position += len(line)
            record = _parse(line)
            if record is None:
                continue
            if record["step"] > resume_step:
                break
            end, last = position, line
            if record["step"] == resume_step:
                known.add((record["kind"], resume_step))
        self._file.truncate(end)
        if not last.endswith(b"\n"):
            append(self._file, b"\n")
        return known


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a metrics.jsonl, and how many of its lines cannot be read (torn by a
    crash).
    """
    with path.open("rb") as file:
        records = [_parse(line) for line in file]
    readable = [record for record in records if record is not None]
    return readable, len(records) - len(readable)


def append(file: io.FileIO, data: bytes) -> None:
    """Writes all of `data` at the end of an unbuffered file, or nothing of it and raises
    OSError.
    """
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
    sound = (
        isinstance(record, dict)
        and isinstance(record.get("step"), int)
        and isinstance(record.get("kind"), str)
    )
    return record if sound else None
