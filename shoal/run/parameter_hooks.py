"""Hooks that the script has registered on parameters: only those that act on each row alike.

In a step a hook sees the gradient of some rows of the batch. One that gives for a sum of gradients
the sum of what it gives for each (a mask, a factor, a look) does what it does on one device. A
bound or a norm does not, and shards have no place for hooks at all: both are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import accumulation_hooks, gradient_hooks, has_hooks
from shoal.strategies.base import LocalModel

_OWN = ("shoal", "torch")
"""Packages whose hooks belong to a strategy or an engine."""
CURE = (
    "Change gradients between run.forward_backward and optimizer.step() instead, where .grad and "
    "run.gradients() have those of the whole batch; run.clip_gradients(max_norm) bounds them."
)


class ParameterHooks:
    """Looks for hooks of the script that would not act as on one device.

    Args:
        before: the parameters as they were before strategies replaced them.
        is_whole: each step is one pass of one process over the whole batch, or hooks are to see
            the gradients of parts.

    Raises: StrategyRefused: a parameter that was replaced has a hook.
    """

    def __init__(
        self, local_model: LocalModel, before: Mapping[str, nn.Parameter], is_whole: bool
    ) -> None:
        self._parameters = dict(local_model.trainable_params)
        self._all = [] if is_whole else list(self._parameters.values())
        self._checked: set[int] = set()
        for name, parameter in self._parameters.items():
            former = before.get(name, parameter)
            if former is not parameter and has_hooks(former) and not is_whole:
                raise _refusal(name, "a part of its gradient is on this rank alone")

    def check(self) -> None:
        """Raise StrategyRefused for a hook that sees another gradient than on one device."""
        if not has_hooks(*self._all):
            return
        for name, parameter in self._parameters.items():
            if any(map(_is_of_script, accumulation_hooks(parameter).values())):
                raise _refusal(name, "it would act on the gradient of each part of a batch")
            for key, hook in gradient_hooks(parameter).items():
                if key in self._checked or not _is_of_script(hook):
                    continue
                if isinstance(parameter, DTensor):
                    raise _refusal(name, "a part of its gradient is on this rank alone")
                if not _is_additive(hook, parameter):
                    raise _refusal(name, "for a sum it does not give what it gives for the parts")
                self._checked.add(key)


def _refusal(name: str, why: str) -> StrategyRefused:
    return StrategyRefused(
        f"{name} has a hook, which would see the gradient of some rows of the batch: {why}. {CURE}"
    )


def _is_of_script(hook: Any) -> bool:
    """Return True for a hook that no strategy and no engine has registered."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] not in _OWN


def _is_additive(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    """Return whether a hook gives for a sum of gradients the sum of what it gives for each."""
    generator = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        for _ in range(2)
    )

    def hooked(gradient: Tensor) -> Tensor:
        given = gradient.detach().clone()
        changed = hook(given)
        return given if changed is None else changed

    apart, whole = hooked(one) + hooked(other), hooked(one + other)
    return torch.allclose(apart, whole, rtol=1e-3, atol=1e-6)
