"""Whole parameters in the place of shards: for a while, or for good.

A trial of the loss runs the models on a few rows, another number of times on each rank. So the
engine's hooks, which gather and reduce with all ranks, are taken off meanwhile. Where other layers
are to be trained, the models become what they were, and are sharded anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.platform.torch_private.fsdp import forget_module
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
        self._before = {
            module: _Before(_hook_ids(module), type(module), {*vars(module)})
            for module in model.modules()
        }
        self._added: dict[nn.Module, set[int]] = {}

    def note_hooks(self) -> None:
        """Note the hooks that were added since the beginning: those of the engine."""
        self._added = {
            module: _hook_ids(module) - before.hooks for module, before in self._before.items()
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
            self._put_whole(shards)
            hooks += self._take_off_hooks()
            yield True
        finally:
            for attributes, name, found in hooks:
                attributes[name] = found
            for table, key, shard in shards:
                table[key] = shard

    def restore(self) -> None:
        """Make the models what they were before they were sharded. Collective."""
        self._put_whole([])
        for _ in self._take_off_hooks():
            pass
        for module, before in self._before.items():
            forget_module(module, before.kind, before.attributes)

    def _put_whole(self, shards: list[tuple[Table, str, DTensor]]) -> None:
        """Put whole parameters into the models; add what was there to `shards`. Collective."""
        put_whole((own_parameters(module) for module in self._model.modules()), shards)

    def _take_off_hooks(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module, added in self._added.items():
            for name in (*HOOKS, *HOOKS_OF_STATE):
                found = vars(module)[name]
                if added & found.keys():
                    yield vars(module), name, found
                    kept = ((key, hook) for key, hook in found.items() if key not in added)
                    vars(module)[name] = OrderedDict(kept)


class _Before(NamedTuple):
    """A module before it was given to the engine.

    Attributes:
        hooks: ids of its hooks.
        attributes: names in its `__dict__`.
    """

    hooks: set[int]
    kind: type[nn.Module]
    attributes: set[str]


def _hook_ids(module: nn.Module) -> set[int]:
    return {key for name in (*HOOKS, *HOOKS_OF_STATE) for key in vars(module)[name]}
