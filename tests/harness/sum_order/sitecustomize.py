"""Python runs this at its start where this directory is in PYTHONPATH: see `other_sums`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and replaces its kernels once it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            from other_sums import replace_kernels

            replace_kernels()

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())
