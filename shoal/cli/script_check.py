"""A check of a user's script before any process starts."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

from shoal.config.setting_fields import is_path
from shoal.errors import UsageError


def check_script(verb: str, name: str) -> None:
    """Raise UsageError if a script is no Python file. Args: verb: that was typed."""
    if not is_path(name) or not Path(name).is_file():
        raise UsageError(f"{verb}: there is no script {name}. Give the path of a Python file.")
    try:
        with tokenize.open(name) as file:
            ast.parse(file.read(), name)
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{verb}: {name} is no Python file: {error}") from error
