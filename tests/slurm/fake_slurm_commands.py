"""The commands of `fake_slurm` on the PATH of a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fake_slurm.py")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the commands on the PATH, and return the folder of their job."""
    commands = folder / "commands"
    state = folder / "state"
    commands.mkdir()
    state.mkdir()
    for name in ("sbatch", "sinfo", "srun", "scontrol", "scancel"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{PROGRAM}" {name} "$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return state
