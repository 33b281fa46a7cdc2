"""Another user of this machine, as real processes that `setpriv` starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

STRANGER = 54321
"""A user that no machine of tests has, so that no process but those of tests belongs to it."""
# The stranger may not be able to enter the directory of this interpreter.
PYTHON = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can be another user",
)
needs_python = pytest.mark.skipif(PYTHON is None, reason="no interpreter that all users can run")


def as_stranger(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command as the stranger, to its end."""
    command = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30, cwd="/", **more
    )


def strangers_files(directory: Path, files: Mapping[str, str]) -> Path:
    """Make `directory` with these files, by name, as the stranger."""
    as_stranger("mkdir", "-p", str(directory))
    for name, text in files.items():
        as_stranger("sh", "-c", f'cat > "{directory / name}"', input=text)
    return directory


def python_of_stranger(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program as the stranger, to its end."""
    assert PYTHON is not None
    return as_stranger(PYTHON, "-c", program, *words)
