"""Modules as they were before a strategy divided them, as a trial of the loss needs them.

apply      Linear (8, 6) ──> ColumnParallelLinear, its weight a DTensor, of which (4, 6) lie here
whole      Linear (8, 6), whole on every rank, with the values of all steps since

A trial runs the models on a few rows, another number of times on each rank. So hooks of an engine,
which gather and reduce with all ranks, are taken off meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.norm import full_tensor
from shoal.platform.torch_private.module_state import (
    HOOKS,
    HOOKS_OF_STATE,
    own_buffers,
    own_parameters,
)

MOST_BYTES = 1 << 30
"""Whole parameters that are put beside shards on the CPU for a while."""
SHARE_OF_FREE = 0.25
"""Share of a GPU's free memory that they may take there; gradients come to as much."""
HOOK_TABLES = (*HOOKS, *HOOKS_OF_STATE)
Table = dict[str, Any]
"""The own parameters of a module, or its own buffers, by their keys."""


def _whole_fits(model: nn.Module, axis: Axis) -> bool:
    """Return whether every rank has room for whole parameters beside its shards. Collective.

    Args: axis: over which parameters are sharded.
    """
    parameters = dict.fromkeys(model.parameters())
    num_bytes = sum(p.numel() * p.element_size() for p in parameters)
    limit: float = MOST_BYTES
    if axis.device.type == "cuda":
        limit = SHARE_OF_FREE * torch.cuda.mem_get_info(axis.device)[0]
    return not axis.on_any_rank(num_bytes > limit)


def _put_whole(tables: Iterable[Table], undo: ExitStack) -> None:
    """Put whole tensors in the place of DTensors, until `undo` is closed. Collective."""
    whole: dict[int, Any] = {}
    for table in tables:
        for key, shard in table.items():
            if not isinstance(shard, DTensor):
                continue
            undo.callback(table.__setitem__, key, shard)
            if id(shard) not in whole:  # tied parameters stay one
                full = full_tensor(shard)
                is_parameter = isinstance(shard, nn.Parameter)
                whole[id(shard)] = nn.Parameter(full, shard.requires_grad) if is_parameter else full
            table[key] = whole[id(shard)]


class FormerModules:
    """The classes, attributes and hooks of all modules of a model, before a strategy changes them.

    Args: model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = [
            (module, type(module), dict(vars(module)), {n: {*vars(module)[n]} for n in HOOK_TABLES})
            for module in model.modules()
        ]
        self._changes: list[_Change] = []

    def note_changes(self) -> None:
        """Note what has changed since the beginning. The script may change other attributes later,
        which stay as they are then.
        """
        for module, kind, before, hooks_before in self._seen:
            now = vars(module)
            replaced = {key: value for key, value in before.items() if now.get(key) is not value}
            added = now.keys() - before.keys()
            hooks = {name: now[name].keys() - hooks_before[name] for name in HOOK_TABLES}
            if replaced or added or type(module) is not kind or any(hooks.values()):
                self._changes.append(_Change(module, kind, replaced, added, hooks))
        self._seen = []  # holds values that the script may replace

    @contextmanager
    def whole(self, axis: Axis, is_bounded: bool = True) -> Iterator[bool]:
        """Let this rank run the models alone inside, and yield True; False if they do not fit.

        Collective at its beginning; passes inside are not.

        Args:
            axis: over which parameters are sharded.
            is_bounded: False: they fit, for a step makes them whole too.
        """
        if is_bounded and not _whole_fits(self._model, axis):
            yield False
            return
        modules = [*self._model.modules()]
        tables = (table for each in modules for table in (own_parameters(each), own_buffers(each)))
        with ExitStack() as undo:
            _put_whole(tables, undo)
            for module, kind, replaced, added, hooks in self._changes:
                now = vars(module)
                keys = added | replaced.keys() | hooks.keys()
                divided = {key: now[key] for key in keys & now.keys()}
                undo.callback(_set_attributes, module, type(module), keys, divided)
                kept_hooks = {
                    name: OrderedDict(i for i in (now | replaced)[name].items() if i[0] not in own)
                    for name, own in hooks.items()
                }
                _set_attributes(module, kind, keys, replaced | kept_hooks)
            yield True


def _set_attributes(
    module: nn.Module, kind: type[nn.Module], keys: Set[str], attributes: Table
) -> None:
    """Give a module a class and these of its attributes; it loses the others of `keys`."""
    module.__class__ = kind
    for key in keys - attributes.keys():
        vars(module).pop(key, None)
    vars(module).update(attributes)


class _Change(NamedTuple):
    """A module before it was changed.

    Attributes:
        replaced: attributes that have other values now.
        added: names of attributes that it did not have.
        hooks: name of a table of hooks -> keys of those that it did not have.
    """

    module: nn.Module
    kind: type[nn.Module]
    replaced: dict[str, Any]
    added: set[str]
    hooks: dict[str, set[int]]
