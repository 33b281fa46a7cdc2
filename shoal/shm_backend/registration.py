"""Registration of backend "shoal" with torch.distributed, by `import shoal` alone.

`import shoal` may come before or after `import torch`, and it must not wait for torch, which takes
seconds to import. If torch is not imported yet, a finder is put into Python's import path. When
torch.distributed is imported, the finder removes itself and registers the backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

GLOO_BACKEND_NAME = "shoal_gloo"
"""Gloo in a `ShoalGroup`, for messages in the background of training: a trace records them."""
C10D_MODULE = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend with torch, now or when torch is imported."""
    if (module := sys.modules.get(C10D_MODULE)) is not None:
        register_with(module)
    elif not any(isinstance(finder, _C10dFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _C10dFinder())


def register_with(module: ModuleType) -> None:
    """Register the backend. `module` is torch.distributed.distributed_c10d."""
    if not hasattr(module.Backend, "SHOAL"):
        module.Backend.register_backend("shoal", _create, extended_api=True, devices=["cpu"])
        module.Backend.register_backend(
            GLOO_BACKEND_NAME,
            partial(_create, shared_memory=False),
            extended_api=True,
            devices=["cpu"],
        )
        _extend_monitored_barrier(module)


def _extend_monitored_barrier(module: ModuleType) -> None:
    """Let `torch.distributed.monitored_barrier` take groups of this backend.

    Its Gloo can do it, but torch asks for the name of the backend.
    """
    of_gloo = module.monitored_barrier

    @wraps(of_gloo)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        from shoal.shm_backend.group import ShoalGroup

        chosen = module.GroupMember.WORLD if group is None else group
        if not isinstance(chosen, ShoalGroup):
            of_gloo(group, timeout, wait_all_ranks)
            return
        limit = module.default_pg_timeout if timeout is None else timeout
        if not isinstance(limit, timedelta):
            limit = timedelta(seconds=limit)
        chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
    package = sys.modules.get("torch.distributed")
    if getattr(package, "monitored_barrier", None) is of_gloo:
        package.monitored_barrier = monitored_barrier  # type: ignore[union-attr]


def _create(options: Any, backend_options: Any, shared_memory: bool = True) -> Any:
    """Make a group. torch calls this function with its own two option objects."""
    from shoal.shm_backend.group import ShoalGroup

    return ShoalGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        str(options.group_id),
        shared_memory,
    )


class _C10dFinder:
    """Finds torch.distributed.distributed_c10d, and nothing else.

    It does not derive from a class of importlib.abc, whose import takes as long as the rest of
    `import shoal`, which every agent on every host pays.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != C10D_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_with(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
