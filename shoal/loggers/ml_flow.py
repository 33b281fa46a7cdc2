"""Measurements in MLflow, at MLFLOW_TRACKING_URI or where MLflow keeps them without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from shoal.loggers import kept_id
from shoal.loggers.metrics_file import Record

MOST_CHARACTERS = 500
"""Length of a setting's value."""


class MlflowLogger:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME or "shoal".

    Arguments as in `open_logger`.
    """

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        self._client = MlflowClient()
        self._run = self._open(directory)
        params = [Param(k, str(v)[:MOST_CHARACTERS]) for k, v in settings.items()]
        if not resume_step and params:
            self._client.log_batch(self._run, params=params)

    def write(self, kind: str, record: Record) -> None:
        """Write measurements of a step, all at once."""
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
