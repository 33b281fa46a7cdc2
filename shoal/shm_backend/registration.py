"""How torch.distributed learns that there is a backend "shoal": by `import shoal`, before or after
`import torch`.

`import shoal` must not wait for torch, which takes seconds. So where torch is not there yet, an
entry is put where Python looks for modules; it waits for torch.distributed, registers the backend,
and has gone by then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

GLOO_BACKEND_NAME = "shoal_gloo"
"""Gloo in a group of ours, for what goes on beside training: a trace sees it."""
HOME = "torch.distributed.distributed_c10d"


def register() -> None:
    """Let torch know of the backend, now or when it is imported."""
    if (module := sys.modules.get(HOME)) is not None:
        register_with(module)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def register_with(module: ModuleType) -> None:
    """`module` is torch.distributed.distributed_c10d."""
    if not hasattr(module.Backend, "SHOAL"):
        module.Backend.register_backend("shoal", _create, extended_api=True, devices=["cpu"])
        module.Backend.register_backend(
            GLOO_BACKEND_NAME, _create_beside, extended_api=True, devices=["cpu"]
        )


def _create(options: Any, _: Any, meets: bool = True) -> Any:
    from shoal.shm_backend.group import ShoalGroup

    timeout: timedelta = options.timeout
    ranks, label = options.global_ranks_in_group, str(options.group_id)
    return ShoalGroup(
        options.store, options.group_rank, options.group_size, timeout, ranks, label, meets
    )


def _create_beside(options: Any, more: Any) -> Any:
    return _create(options, more, meets=False)


class _WhenImported(MetaPathFinder):
    """Finds torch.distributed.distributed_c10d, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != HOME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Loads as the real loader does, and registers the backend then."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # source, path and so on, for tracebacks
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        register_with(module)
