"""Weights that a layer writes in its own forward pass, where that pass has a copy of them.

      gather ── forward: self.weight.data = sign(...) ── free      the shards know nothing of it

One device keeps what was written. The first step compares the weights of each layer before and
after its forward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook, Removable, is_shard


class ForwardWrites:
    """Notes which gathered weight a forward pass has written, until the end of the first step."""

    def __init__(self, guarded: GuardedModels) -> None:
        self._under = guarded.under
        self._written = ""
        self._before: dict[tuple[nn.Module, str], Tensor] = {}
        self._hooks: list[Removable] = []
        for prefix, model in guarded.models.items():
            for path, module in model.named_modules():
                if any(is_shard(p) for p in module.parameters(recurse=False) if p.requires_grad):
                    name = f"{prefix}{path}." if path else prefix
                    # torch's engine frees the weights in a hook of its own, after this one.
                    after = ModuleHook(partial(self._compare, name))
                    self._hooks += [
                        module.register_forward_pre_hook(ModuleHook(self._keep)),
                        module.register_forward_hook(after, prepend=True),
                    ]

    def check(self) -> None:
        """End the watch. Raises: UsageError: a forward pass has written a weight."""
        self.remove()
        if self._written:
            raise UsageError(
                f"{self._written} is written by the forward pass of its layer. One device keeps "
                f"what was written;{self._under} the layer has a copy of the weight, which is gone "
                "after the step. Let the layer compute with a value of its own, such as "
                "F.linear(x, self.weight.sign()), write weights between steps, or use ddp."
            )

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._before.clear()

    def _keep(self, module: nn.Module, _inputs: Any) -> None:
        for name, weight in _gathered(module):
            self._before[module, name] = weight.clone()

    def _compare(self, prefix: str, module: nn.Module, _inputs: Any, _output: Any) -> None:
        for name, weight in _gathered(module):
            before = self._before.pop((module, name), None)
            if before is not None and not torch.equal(before, weight):
                self._written = self._written or f"{prefix}{name}"


def _gathered(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trainable weights of a layer that are whole now."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return []
    own = module.named_parameters(recurse=False)
    return [(name, p.detach()) for name, p in own if p.requires_grad and not is_shard(p)]
