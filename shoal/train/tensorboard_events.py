"""TensorBoard's events of a run: the scalars `train/*` and `validation/*`. Imported by those
who want them only.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from shoal.train.metrics_file import Record, append

PLACES = ("step", "epoch", "sample", "time_s")  # where a record was measured, not what


class Events:
    """An event file, each record in the file when `write` returns.

    Not torch's SummaryWriter: its thread holds back up to two minutes of events, is in the way of
    forked data-loader workers, and dies with a traceback when the disk is full. The format and the
    protocol are TensorBoard's own.

    Args: directory: made if it is not there; earlier files stay. resume_step: last step of the
        earlier files that counts; TensorBoard forgets what they say about later ones.

    Raises: OSError: from here or from `write`; an event that did not fit on the disk is left out as
        a whole.
    """

    def __init__(self, directory: Path, resume_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Readers take the files in the order of their names.
        order = sum(1 for _ in directory.glob("events.out.tfevents.*"))
        self._file = io.FileIO(
            directory / f"events.out.tfevents.{int(time.time()):010d}.{order:06d}.shoal", "x"
        )
        self._write(file_version="brain.Event:2")
        self._write(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, kind: str, record: Record) -> None:
        """Appends the numbers of a record as scalars `kind/name`."""
        scalars = {f"{kind}/{name}": value for name, value in record.items() if name not in PLACES}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=int(record["step"]), summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        framed = io.BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
        append(self._file, framed.getvalue())
