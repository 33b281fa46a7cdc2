"""`optimizer.state` where other processes hold it, or other stages hold a part of it.

optimizer.state[p]["exp_avg"], len(), .values()   an error, which names `run.state()`
optimizer.state[p] = ..., .pop(p), .clear()       an error; each stage may clear its own
optimizer.state = defaultdict(dict)               found at the next call of `forward_backward`
copy.deepcopy(optimizer), pickle                  an error

Without these a script would find no state, or that of one stage, and go on. torch and Shoal
themselves see what this rank has. So does the optimizer's own `step`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Never

from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.script_line import call_site, is_called_outside
from shoal.run.guards.guarded_models import GuardedModels

_READS_AND_WRITES = (
    *("__getitem__", "__contains__", "__iter__", "__len__", "__bool__", "__eq__", "__or__"),
    *("__ror__", "__reversed__", "__repr__", "get", "keys", "values", "items", "copy"),
    *("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update"),
)


class GuardedState(defaultdict[Any, Any]):
    """An optimizer's state on this rank, which only torch, Shoal and the optimizer may look at.

    Args: refuse: raises the error about a call of the user's, given its words.
    """

    def __init__(
        self, values: Any, optimizer: Optimizer, refuse: Callable[[str], Never], can_clear: bool
    ) -> None:
        super().__init__(dict)
        self.optimizer = weakref.ref(optimizer)
        self.refuse = refuse
        self.can_clear = can_clear
        super().update(values)

    def clear(self) -> None:
        """Forget all state."""
        if not self.can_clear and is_called_outside(self.optimizer()):
            self.refuse("optimizer.state.clear()")
        super().clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("a copy of optimizer.state, or its pickle")

    def __copy__(self) -> Never:
        self.refuse("a copy of optimizer.state")


def _guarded_method(name: str) -> Callable[..., Any]:
    inherited = dict.__len__ if name == "__bool__" else getattr(defaultdict, name)
    words = f"optimizer.state{'' if name.startswith('__') else f'.{name}()'}"

    def method(self: GuardedState, *args: Any, **kwargs: Any) -> Any:
        if is_called_outside(self.optimizer()):
            self.refuse(words)
        result = inherited(self, *args, **kwargs)
        return bool(result) if name == "__bool__" else result

    method.__name__ = name
    return method


for _name in _READS_AND_WRITES:
    setattr(GuardedState, _name, _guarded_method(_name))


class OptimizerStates:
    """Guards the states of all optimizers of a run, until `undo` is closed.

    Args: guarded: the state of their optimizers is remote, or they have that of one stage.
    """

    def __init__(self, guarded: GuardedModels, undo: ExitStack) -> None:
        self._guarded = guarded
        self._is_remote = guarded.local_model.remote_optimizer is not None
        undo.callback(self._unwrap)
        for optimizer in guarded.optimizers:
            self._wrap(optimizer)
            undo.callback(optimizer.register_load_state_dict_post_hook(self._wrap).remove)

    def check(self) -> None:
        """Raise UsageError if another state was put in the place of one that servers have."""
        for optimizer in self._guarded.optimizers:
            if type(optimizer.state) is GuardedState:
                continue
            if self._is_remote:
                self._refuse("optimizer.state = ...")
            self._wrap(optimizer)

    def _unwrap(self) -> None:
        """Give the optimizers plain dicts again."""
        for optimizer in self._guarded.optimizers:
            if type(optimizer.state) is GuardedState:
                optimizer.state = defaultdict(dict, dict.items(optimizer.state))

    def _wrap(self, optimizer: Optimizer) -> None:
        values = [*dict.items(optimizer.state)]
        optimizer.state = GuardedState(values, optimizer, self._refuse, not self._is_remote)

    def _refuse(self, call: str) -> Never:
        where = "this rank has the optimizer's state of its own stage"
        if self._is_remote:
            where = "the servers hold the optimizer's state"
        raise UsageError(
            f"{call}{call_site()}{self._guarded.under}: {where}. run.state() returns all of it, "
            "and run.load_state(...) sets it, on all ranks; or use ddp, where every rank has all "
            "state."
        )
