"""Whole parameters in the place of shards for a while.

A trial of the loss runs the models on a few rows, another number of times on each rank. So the
engine's hooks, which gather and reduce with all ranks, are taken off meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.platform.torch_private.module_state import HOOKS, HOOKS_OF_STATE, own_parameters
from shoal.strategies.former_modules import Table, put_whole, whole_fits


class WholeModels:
    """The hooks of a model before its parameters are sharded.

    Args:
        model: the user's model, or a container of several.
        data: the axis over which parameters are sharded.
    """

    def __init__(self, model: nn.Module, data: Axis) -> None:
        self._model = model
        self._data = data
        self._before = {module: _hook_ids(module) for module in model.modules()}
        self._added: dict[nn.Module, set[int]] = {}

    def note_hooks(self) -> None:
        """Note the hooks that were added since the beginning: those of the engine."""
        self._added = {
            module: _hook_ids(module) - before for module, before in self._before.items()
        }

    @contextmanager
    def whole(self, is_bounded: bool) -> Iterator[bool]:
        """Let this rank run the models alone inside, and yield True.

        Collective at its beginning; passes inside are not.

        Args: is_bounded: whole parameters may be too large; False is yielded then, on all ranks.
        """
        if is_bounded and not whole_fits(self._model, self._data):
            yield False
            return
        shards: list[tuple[Table, str, DTensor]] = []
        hooks: list[tuple[dict[str, Any], str, Any]] = []
        try:
            put_whole((own_parameters(module) for module in self._model.modules()), shards)
            hooks += self._take_off_hooks()
            yield True
        finally:
            for attributes, name, found in hooks:
                attributes[name] = found
            for table, key, shard in shards:
                table[key] = shard

    def _take_off_hooks(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module, added in self._added.items():
            for name in (*HOOKS, *HOOKS_OF_STATE):
                found = vars(module)[name]
                if added & found.keys():
                    yield vars(module), name, found
                    kept = ((key, hook) for key, hook in found.items() if key not in added)
                    vars(module)[name] = OrderedDict(kept)


def _hook_ids(module: nn.Module) -> set[int]:
    return {key for name in (*HOOKS, *HOOKS_OF_STATE) for key in vars(module)[name]}
