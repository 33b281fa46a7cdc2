"""Hooks that the script has registered on parameters: only those that act on each row alike.

In a step a hook sees the gradient of some rows of the batch. One that gives for a sum of gradients
the sum of what it gives for each (a mask, a factor, a look) does what it does on one device. A
bound or a norm does not, and shards have no place for hooks at all: both are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import accumulation_hooks, gradient_hooks, has_hooks
from shoal.strategies.base import LocalModel
from shoal.strategies.grad_checks import is_of_script
from shoal.trial.child_process import computed_in_child

SCALES = (1e-3, 1e-2, 1.0, 1e2, 1e3)
"""Sizes of gradients that hooks are tried on: a bound may be far above most of them, or below."""
NamedHook = tuple[str, Callable[[Tensor], Tensor | None], Tensor]
"""A hook of the script, after the name of its parameter and before the parameter."""
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
        new: list[NamedHook] = []
        for name, parameter in self._parameters.items():
            if any(map(is_of_script, accumulation_hooks(parameter).values())):
                raise _refusal(name, "it would act on the gradient of each part of a batch")
            for key, hook in gradient_hooks(parameter).items():
                if key in self._checked or not is_of_script(hook):
                    continue
                if isinstance(parameter, DTensor):
                    raise _refusal(name, "a part of its gradient is on this rank alone")
                self._checked.add(key)
                new.append((name, hook, parameter))
        if new and (name := _not_additive(new)):
            raise _refusal(name, "for a sum it does not give what it gives for the parts")


def _refusal(name: str, why: str) -> StrategyRefused:
    return StrategyRefused(
        f"{name} has a hook, which would see the gradient of some rows of the batch: {why}. {CURE}"
    )


def _not_additive(hooks: Sequence[NamedHook]) -> str:
    """Return the name of a parameter with a hook that does not give for a sum of gradients the sum
    of what it gives for each; empty if there is none.
    """
    # In children that begin alike: a hook may count its calls. One that fails there fails in the
    # step too.
    one, other, whole = (
        computed_in_child(partial(_sums, hooks, factors), lambda _: list[Tensor]())
        for factors in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    )
    for (name, *_), a, b, both in zip(hooks, one, other, whole, strict=False):
        if not torch.allclose(a + b, both, rtol=1e-3, atol=1e-3 * float(both.abs().max())):
            return name
    return ""


def _sums(hooks: Sequence[NamedHook], factors: tuple[float, float]) -> list[Tensor]:
    """Return random sums of what each hook makes of a sum of two random gradients."""
    found = []
    for _, hook, parameter in hooks:
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, parameter.shape, generator=generator, dtype=torch.float64)
        gradient = factors[0] * draw() + factors[1] * draw()
        made = [_made(hook, (scale * gradient).to(parameter)) / scale for scale in SCALES]
        found.append(torch.stack([(m * draw()).sum() for m in made for _ in range(4)]))
    return found


def _made(hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor:
    changed = hook(gradient)
    return (gradient if changed is None else changed).detach().double().cpu()
