"""TensorBoard events of a run: the scalars `train/*` and `validation/*`.

A module of its own, because tensorboard is an optional dependency.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from shoal.loggers.metrics_file import Record, append

POSITIONS = ("step", "epoch", "sample", "time_s")
"""Names in a record that say when it was measured: no scalars."""


class Events:
    """An event file in directory/tensorboard: each record is in it when `write` returns.

    torch's SummaryWriter is not used. Its thread keeps up to two minutes of events in memory, is
    dangerous when data-loader workers are forked, and dies with a traceback when the disk is full.
    The format is TensorBoard's own.

    Args:
        directory: of the run; earlier files stay.
        resume_step: TensorBoard ignores events of later steps in earlier files.
        settings: are not written.

    Raises:
        OSError: here or in `write`. An event that does not fit on the disk is left out completely.
    """

    def __init__(
        self, directory: Path, resume_step: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        directory /= "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        order = sum(1 for _ in directory.glob("events.out.tfevents.*"))
        self._file = io.FileIO(
            directory / f"events.out.tfevents.{int(time.time()):010d}.{order:06d}.shoal", "x"
        )
        self._write(file_version="brain.Event:2")
        self._write(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, kind: str, record: Record) -> None:
        """Append the numbers of a record as scalars `kind/name`."""
        scalars = {
            f"{kind}/{name}": value for name, value in record.items() if name not in POSITIONS
        }
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=int(record["step"]), summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        framed = io.BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
        append(self._file, framed.getvalue())
