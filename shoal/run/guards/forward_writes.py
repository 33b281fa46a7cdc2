"""Weights that a layer writes in its own forward pass, where that pass has a copy of them.

      gather ── forward: self.weight.data = sign(...) ── free      the shards know nothing of it

One device keeps what was written. The first step compares the weights of each layer before and
after its forward pass.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook
from shoal.run.optimizer_binding import is_shard


class ForwardWrites:
    """Notes which gathered weight a forward pass has written, until the end of the first step."""

    def __init__(self, guarded: GuardedModels, undo: ExitStack) -> None:
        self._under = guarded.under
        self._written = ""
        # What calls that are under way have found gathered, by the path of the module.
        self._before: dict[str, dict[str, Tensor]] = {}
        self._hooks = undo.enter_context(ExitStack())
        for path, module in guarded.modules():
            if any(is_shard(p) and p.requires_grad for p in module.parameters()):
                before = ModuleHook(partial(self._keep, path))
                self._hooks.callback(module.register_forward_pre_hook(before).remove)
                # torch's engine frees the weights in a hook of its own, after this one.
                after = ModuleHook(partial(self._compare, path))
                self._hooks.callback(module.register_forward_hook(after, prepend=True).remove)

    def check(self) -> None:
        """End the watch. Raises: UsageError: a forward pass has written a weight."""
        self._hooks.close()
        self._before.clear()
        if self._written:
            raise UsageError(
                f"{self._written} is written by a forward pass. One device keeps what was "
                f"written;{self._under} the pass has a copy of the weight, which is gone after "
                "the step. Compute with another value, such as F.linear(x, self.weight.sign()), "
                "write weights between steps, or use ddp."
            )

    def _keep(self, path: str, module: nn.Module, _inputs: Any) -> None:
        known = {name for kept in self._before.values() for name in kept}
        self._before[path] = {
            name: weight.clone() for name, weight in _gathered(path, module) if name not in known
        }

    def _compare(self, path: str, module: nn.Module, _inputs: Any, _output: Any) -> None:
        kept = self._before.pop(path, {})
        for name, weight in _gathered(path, module):
            if name in kept and not torch.equal(kept[name], weight):
                self._written = self._written or name


def _gathered(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trainable weights in a module that are whole now, by their full names."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return []
    return [
        (f"{path}{name}", weight.detach())
        for name, weight in module.named_parameters()
        if weight.requires_grad and not is_shard(weight) and weight.untyped_storage().nbytes()
    ]
