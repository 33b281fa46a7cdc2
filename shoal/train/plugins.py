"""`--import FILE`: the user's own models and data sets, in dicts of a Python file.

# mine.py
models = {"my_net": MyNet}      # called as MyNet(num_classes=..., input_shape=..., **options)
data = {"my_data": load}        # called as load(config.data, seed) -> shoal.data.source.Source
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError


@dataclass(frozen=True)
class Registered:
    """Models and data sets of the files, by name."""

    models: dict[str, Callable[..., Any]] = field(default_factory=dict)
    data: dict[str, Callable[..., Any]] = field(default_factory=dict)


def load(files: Iterable[str]) -> Registered:
    """Run the files and collect their `models` and `data`.

    Raises:
        ConfigError: files that do not exist or define neither of the two.
    """
    registered = Registered()
    problems = []
    for name in files:
        path = Path(name)
        if not path.is_file():
            problems.append(f"--import {name}: there is no such file")
            continue
        module = _run(path)
        if not (hasattr(module, "models") or hasattr(module, "data")):
            problems.append(f"--import {name}: it defines neither a `models` nor a `data` dict")
        registered.models.update(getattr(module, "models", {}))
        registered.data.update(getattr(module, "data", {}))
    if problems:
        raise ConfigError(problems)
    return registered


def _run(path: Path) -> Any:
    # The prefix keeps a file from hiding a library's module of the same name.
    spec = importlib.util.spec_from_file_location(f"shoal_import_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
