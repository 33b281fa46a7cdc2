"""Stepping inside the backward pass, so that the gradients never exist all at once.

      backward   gradient of layer 3 ─ step ─ free │ gradient of layer 2 ─ step ─ free │ gradient of layer 1 ─ ...

Each parameter is stepped as soon as its gradient is the mean over all ranks, and the gradient is
freed. That is right for an optimizer that treats every parameter by itself, as all of torch.optim
do but LBFGS. What needs all gradients at
once cannot be had: their norm, a sum over several backward passes, a count that is known only after
the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError, StrategyRefused, UsageError
from shoal.strategies.base import LocalModel, LossFunction

CURE = "Use step_in_backward=False (optimizer.in_backward: false)."


class OptimizerInBackward:
    """Steps `optimizer` during the backward passes of `part`.

    Raises: StrategyRefused: the strategy has the means only after the backward pass, or keeps all
    gradients anyway."""

    def __init__(self, optimizer: Optimizer, part: LocalModel) -> None:
        if part.grads_not_ready_reason:
            raise StrategyRefused(f"step_in_backward: {part.grads_not_ready_reason}")
        self._optimizer, self._owned, self._uncertain = (
            optimizer,
            part.trainable_params,
            part.maybe_unused,
        )
        self._names = {id(parameter): name for name, parameter in part.trainable_params.items()}
        # Without the hooks of a step: they run once, in the step() of the user's loop.
        step: Any = type(optimizer).step
        self._step = step.__wrapped__ if hasattr(step, "hooked") else step
        self._groups: dict[int, dict[str, Any]] = {}
        self._stepped: set[int] = set()
        self._open_step = False
        for parameter in part.trainable_params.values():
            parameter.register_post_accumulate_grad_hook(self._has_gradient)
        optimizer.register_step_post_hook(self._ended)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The time of a backward pass; at its end, what was not stepped inside it is.

        Raises: UsageError: there are gradients already, or `optimizer.step()` was not called since
        the last one."""
        held = [name for name, parameter in self._owned.items() if parameter.grad is not None]
        if held:
            raise UsageError(
                f"step_in_backward cannot add to gradients from elsewhere; {held[0]} has one. "
                f"{CURE}"
            )
        if self._open_step:
            raise UsageError(
                "step_in_backward makes each forward_backward a step of its own; this is the "
                "second one without "
                f"optimizer.step(), which adds up gradients elsewhere. {CURE}"
            )
        # Anew each time: load_state_dict gives an optimizer other groups.
        self._groups = {
            id(p): group for group in self._optimizer.param_groups for p in group["params"]
        }
        self._stepped.clear()
        self._open_step = True
        try:
            yield
            for parameter in self._owned.values():
                self._has_gradient(parameter)
        finally:
            self._groups = {}

    def _has_gradient(self, parameter: Tensor) -> None:
        if (
            not self._groups
            or parameter.grad is None
            or self._names[id(parameter)] in self._uncertain
        ):
            return
        if id(parameter) in self._stepped:
            raise UsageError(
                f"{self._names[id(parameter)]}: its gradient came in two pieces in one backward "
                "pass, as it does where "
                "a module that is called more than once is recomputed with use_reentrant=True; a "
                "step needs the whole. "
                f"{CURE}"
            )
        self._stepped.add(id(parameter))
        self._step_alone(parameter)
        parameter.grad = None

    def _step_alone(self, parameter: Tensor) -> None:
        """The very step of the optimizer, with the very group, as if there were no other
        parameter.
        """
        optimizer, group = self._optimizer, self._groups[id(parameter)]
        groups, members = optimizer.param_groups, group["params"]
        optimizer.param_groups, group["params"] = [group], [parameter]
        try:
            with torch.no_grad():
                self._step(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, members

    def _ended(self, *_: Any) -> None:
        """The user's loop has called step(), which found no gradient and did nothing."""
        self._open_step = False


def refuse_with(accumulate: int, loss_scale: bool) -> None:
    """Raise ConfigError where settings of a run contradict stepping inside the backward pass."""
    problems = []
    if accumulate > 1:
        problems.append(
            f"step_in_backward: accumulate={accumulate} adds up gradients of several backward "
            "passes, and stepping "
            "inside each of them leaves nothing to add. Use accumulate=1, or zero2, which holds "
            "shards of the sum only."
        )
    if loss_scale:
        problems.append(
            "step_in_backward: fp16 skips a step when any gradient overflows, which is known only "
            "after the last one. "
            "Use bf16, which needs no loss scale."
        )
    if problems:
        raise ConfigError(problems)


def mean_only(loss_fn: LossFunction) -> LossFunction:
    """`loss_fn`, which must not count for itself."""

    def checked(output: Any, target: Any) -> Tensor:
        value = loss_fn(output, target)
        if isinstance(value, tuple):
            raise UsageError(
                "loss_fn returned a (sum, count) pair: gradients are divided by the count of all "
                "ranks, which is known "
                "only after the backward pass, when step_in_backward has stepped. Return a mean. "
                f"{CURE}"
            )
        return value

    return checked
