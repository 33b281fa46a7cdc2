"""Optimizer steps inside the backward pass, so that never all gradients exist at once.

      backward   gradient of layer 3, step, free │ gradient of layer 2, step, free │ layer 1 ...

Each parameter is stepped as soon as its gradient is the mean over all ranks, and the gradient is
freed. That is correct for an optimizer that treats every parameter by itself, as all optimizers of
torch.optim do except LBFGS.

Three things need all gradients at once, and are refused here: the norm of all gradients, a sum over
several backward passes, and a count that is known only after the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError, StrategyRefused, UsageError
from shoal.strategies.base import ComputeLoss, LocalModel
from shoal.strategies.loss_terms import split_result

CURE = "Use step_in_backward=False (optimizer.in_backward: false)."


class OptimizerInBackward:
    """Steps `optimizer` during the backward passes of a local model.

    Raises:
        StrategyRefused: the strategy has the global means only after the backward pass, or keeps
            all gradients anyway.
    """

    def __init__(self, optimizer: Optimizer, local_model: LocalModel) -> None:
        if local_model.pass_traits.grads_not_ready_reason:
            raise StrategyRefused(
                f"step_in_backward: {local_model.pass_traits.grads_not_ready_reason}"
            )
        self._optimizer = optimizer
        self._params = local_model.trainable_params
        self._maybe_unused = local_model.pass_traits.maybe_unused
        self._names = {id(parameter): name for name, parameter in self._params.items()}
        # torch wraps `step` to run hooks. Those run only in the `step()` of the user's loop.
        step: Any = type(optimizer).step
        self._step = step.__wrapped__ if hasattr(step, "hooked") else step
        self._groups: dict[int, dict[str, Any]] = {}  # by the id of a parameter; empty: not now
        self._stepped: set[int] = set()
        self._open_step = False
        for parameter in self._params.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        optimizer.register_step_post_hook(self._on_optimizer_step)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step each parameter while the context is open, at its end those that were not yet.

        Raises:
            UsageError: there are gradients already, or `optimizer.step()` was not called since the
                last time.
        """
        existing = [name for name, parameter in self._params.items() if parameter.grad is not None]
        if existing:
            raise UsageError(
                f"step_in_backward cannot add to gradients from elsewhere; {existing[0]} has one. "
                f"{CURE}"
            )
        if self._open_step:
            raise UsageError(
                "step_in_backward makes each forward_backward a step of its own; this is the "
                f"second one without optimizer.step(), which adds up gradients elsewhere. {CURE}"
            )
        # Made again each time, because load_state_dict gives an optimizer other groups.
        self._groups = {
            id(p): group for group in self._optimizer.param_groups for p in group["params"]
        }
        self._stepped.clear()
        self._open_step = True
        try:
            yield
            # What was still uncertain in the pass, or came only with `reduce_gradients`.
            for parameter in self._params.values():
                self._on_gradient(parameter)
        finally:
            self._groups = {}

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._groups or parameter.grad is None:
            return
        # This gradient may still be removed, as if the parameter had not been used.
        if self._names[id(parameter)] in self._maybe_unused:
            return
        if id(parameter) in self._stepped:
            raise UsageError(
                f"{self._names[id(parameter)]}: its gradient came in two pieces in one backward "
                "pass, as it does where a module that is called more than once is recomputed with "
                f"use_reentrant=True; a step needs the whole. {CURE}"
            )
        self._stepped.add(id(parameter))
        self._step_alone(parameter)
        parameter.grad = None

    def _step_alone(self, parameter: Tensor) -> None:
        """Call the optimizer's own step as if `parameter` were its only one.

        The group stays the same object, so that settings that the step writes into it are kept.
        """
        optimizer = self._optimizer
        group = self._groups[id(parameter)]
        all_groups = optimizer.param_groups
        all_params = group["params"]
        optimizer.param_groups = [group]
        group["params"] = [parameter]
        try:
            with torch.no_grad():
                self._step(optimizer)
        finally:
            optimizer.param_groups = all_groups
            group["params"] = all_params

    def _on_optimizer_step(self, *_: Any) -> None:
        """Note that the user's loop has called `step()`, which found no gradient to use."""
        self._open_step = False


def check_settings(accumulate: int, loss_scale: bool) -> None:
    """Raise ConfigError if settings of a run contradict steps inside the backward pass."""
    problems = []
    if accumulate > 1:
        problems.append(
            f"step_in_backward: accumulate={accumulate} adds up gradients of several backward "
            "passes, and stepping inside each of them leaves nothing to add. Use accumulate=1, or "
            "zero2, which holds shards of the sum only."
        )
    if loss_scale:
        problems.append(
            "step_in_backward: fp16 skips a step when any gradient overflows, which is known only "
            "after the last one. Use bf16, which needs no loss scale."
        )
    if problems:
        raise ConfigError(problems)


def require_mean(compute_loss: ComputeLoss) -> ComputeLoss:
    """Return `compute_loss` with a check: UsageError if its loss has a count."""

    @wraps(compute_loss)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        terms, _ = split_result(result)
        if any(term.count is not None for term in terms):
            raise UsageError(
                "compute_loss returned counted(sum, count): gradients are divided by the count of "
                "all ranks, which is known only after the backward pass, when step_in_backward has "
                f"stepped. Return a mean. {CURE}"
            )
        return result

    return checked
