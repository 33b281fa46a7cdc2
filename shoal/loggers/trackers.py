"""Measurements in other programs, whose packages are optional: imported where a run uses them.

TensorBoard   events in RUN/tensorboard: the scalars `train/*` and `validation/*`
W&B           project WANDB_PROJECT or "shoal"; WANDB_MODE=offline keeps them in RUN
Trackio       project TRACKIO_PROJECT or "shoal", in TRACKIO_DIR; `trackio show` draws
MLflow        experiment MLFLOW_EXPERIMENT_NAME or "shoal", at MLFLOW_TRACKING_URI or where MLflow
              keeps them without it

Arguments of each class as in `open_logger`.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.loggers import kept_id
from shoal.loggers.metrics_file import Record, append

MOST_CHARACTERS = 500
"""Length of a setting's value in MLflow."""
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
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

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
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = {
            f"{kind}/{name}": value for name, value in record.items() if name not in POSITIONS
        }
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=int(record["step"]), summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
            RecordWriter,
        )

        framed = io.BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
        append(self._file, framed.getvalue())


class WandbLogger:
    """A run of W&B."""

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoal"),
            name=directory.name,
            id=kept_id(directory, "wandb", uuid.uuid4().hex),
            dir=directory,
            resume="allow",
            config=dict(settings),
        )

    def write(self, kind: str, record: Record) -> None:
        """Write measurements; W&B joins those of one step."""
        numbers = {f"{kind}/{name}": value for name, value in record.items() if name != "step"}
        self._run.log(numbers, step=int(record["step"]))

    def close(self) -> None:
        """Write what is left, and end the run."""
        self._run.finish()


class TrackioLogger(WandbLogger):
    """A run of Trackio, whose calls are those of W&B."""

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "shoal"),
            name=kept_id(directory, "trackio", f"{directory.name}-{uuid.uuid4().hex[:6]}"),
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MlflowLogger:
    """A run of MLflow."""

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._run = self._open(directory)
        params = [Param(k, str(v)[:MOST_CHARACTERS]) for k, v in settings.items()]
        if not resume_step and params:
            self._client.log_batch(self._run, params=params)

    def write(self, kind: str, record: Record) -> None:
        """Write measurements of a step, all at once."""
        from mlflow.entities import Metric

        numbers = [
            Metric(f"{kind}/{name}", float(value), 0, int(record["step"]))
            for name, value in record.items()
            if name != "step"
        ]
        self._client.log_batch(self._run, metrics=numbers)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)

    def _open(self, directory: Path) -> str:
        """Return the run that was begun in this directory, or a new one."""
        from mlflow.exceptions import MlflowException

        path = directory / "mlflow.id"
        if path.exists():
            self._client.update_run(path.read_text(), "RUNNING")
            return path.read_text()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
        try:
            experiment = self._client.create_experiment(name)
        except MlflowException:  # another run has made it
            experiment = self._client.get_experiment_by_name(name).experiment_id
        run = self._client.create_run(experiment, run_name=directory.name)
        return kept_id(directory, "mlflow", run.info.run_id)
