"""Measurements in Weights & Biases. WANDB_MODE=offline keeps them in the run's directory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from shoal.loggers import kept_id
from shoal.loggers.metrics_file import Record


class WandbLogger:
    """A run of W&B, in the project WANDB_PROJECT or "shoal".

    Arguments as in `open_logger`.
    """

    def __init__(self, directory: Path, resume_step: int, settings: Mapping[str, Any]) -> None:
        self._run = wandb.init(
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
        """Upload what is left, and end the run."""
        self._run.finish()
