"""Measurements in Trackio, in TRACKIO_DIR of this machine; `trackio show` draws them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from shoal.loggers import kept_id
from shoal.loggers.metrics_file import Record


class TrackioLogger:
    """A run of Trackio, in the project TRACKIO_PROJECT or "shoal".

    Arguments as in `open_logger`.
    """

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        new = f"{directory.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "shoal"),
            name=kept_id(directory, "trackio", new),
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, kind: str, record: Record) -> None:
        """Write measurements of a step."""
        numbers = {f"{kind}/{name}": value for name, value in record.items() if name != "step"}
        self._run.log(numbers, step=int(record["step"]))

    def close(self) -> None:
        """End the run."""
        self._run.finish()
