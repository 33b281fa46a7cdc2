"""Runs on this machine as `shoal launch` makes them: once, with torch's store for `env://`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.launch.output import Output
from shoal.launch.preload import TRAINING
from shoal.launch.restarting import RestartingRun, Work


def run(
    target: Callable[..., Any],
    arguments: Sequence[Any],
    processes: int,
    environment: Mapping[str, str] | None = None,
    output: Output = "first",
    preload: Sequence[str] = TRAINING,
) -> int:
    """Call a function in ranks on this machine, and return the exit code."""
    name = f"{target.__module__}:{target.__name__}"
    work = Work(name, arguments, None, environment or {}, output, preload, torch_store=True)
    return RestartingRun(work, processes).run()
