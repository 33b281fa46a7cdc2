"""`--strategy auto`: the choice is told, and a run that goes on keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.strategies import parse_line
from shoal.train.run_directory import CONFIG


def train(directory: Path, steps: int) -> str:
    """Run `shoal train --strategy auto` and return what it has said."""
    words = [
        *("-m", "shoal", "train", "digits", "-n", "2", "--strategy", "auto"),
        *("--out", str(directory / "run"), "--train.max_steps", str(steps)),
        *("--model.options", "{widths: [8, 16]}", "--train.batch_size", "32"),
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=170,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def test_a_run_takes_the_planners_choice_and_keeps_it(tmp_path: Path) -> None:
    first = train(tmp_path, 2)
    (note,) = [line for line in first.splitlines() if "strategy auto: " in line]
    assert "a step predicted" in note
    chosen = note.split("strategy auto: ")[1].split(": ")[0]
    parse_line(chosen)
    assert f"strategy: {chosen}" in (tmp_path / "run" / CONFIG).read_text()
    again = train(tmp_path, 2)
    assert f"strategy auto: {chosen}, as the run in" in again


def test_auto_beside_other_strategies_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto stands alone"):
        parse_line("auto,zero1")
