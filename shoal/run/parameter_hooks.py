"""Hooks that the script has registered on parameters: they act on the gradient of the whole batch.

one device     backward ──> register_hook ──> added to .grad ──> register_post_accumulate_grad_hook
here           passes of all ranks and micro-batches, without these hooks
               reduced ──> register_hook ──> earlier calls added ──> ..._post_accumulate_grad_hook

In the passes themselves a hook would see the gradient of some rows, of which a bound or a norm is
another, and fully_shard computes with other tensors than those that have hooks. Servers get
gradients from within the passes; there a hook must give for a sum what it gives for its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import (
    accumulation_hooks,
    gradient_hooks,
    has_hooks,
    with_hook_tables,
)
from shoal.strategies.base import LocalModel

_OWN = ("shoal", "torch")
"""Packages whose hooks belong to a strategy or an engine."""
HookTable = dict[int, Any]


class ParameterHooks:
    """Hooks of the script on the parameters that this rank steps.

    Args:
        before: the parameters as they were before strategies replaced them.
        in_backward: gradients are used and freed in the backward pass, so hooks stay there.
    """

    def __init__(
        self, local_model: LocalModel, before: Mapping[str, nn.Parameter], in_backward: bool
    ) -> None:
        self._parameters = dict(local_model.trainable_params)
        self._all = list(self._parameters.values())
        self._is_remote = local_model.remote_optimizer is not None
        self._in_backward = in_backward
        # A handle that the script keeps removes its hook from the table of the former parameter.
        self._former = {
            name: _tables_of(before[name])
            for name, parameter in self._parameters.items()
            if before.get(name, parameter) is not parameter and has_hooks(before[name])
        }
        self._checked: set[int] = set()
        self._taken: list[tuple[nn.Parameter, list[Any], list[Any]]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let no hook of the script run in the passes of this context.

        Raises: StrategyRefused: under servers, for a hook that acts on whole gradients only.
        """
        self._taken = []
        if self._in_backward or not (self._former or with_hook_tables(self._all)):
            yield
            return
        if self._is_remote:
            self._check_additive()
            yield
            return
        removed = [*self._take()]
        try:
            yield
        finally:
            for table, entries in removed:
                table.update(entries)

    def on_gradients(self) -> None:
        """Let hooks see and change the global gradients of this call."""
        for parameter, hooks, _ in self._taken:
            for hook in hooks:
                if parameter.grad is not None:
                    changed = hook(parameter.grad)
                    parameter.grad = parameter.grad if changed is None else changed

    def after_accumulation(self) -> None:
        """Call the hooks that see `.grad` with the gradients of earlier calls in it."""
        for parameter, _, hooks in self._taken:
            for hook in hooks:
                if parameter.grad is not None:
                    hook(parameter)

    def _take(self) -> Iterator[tuple[HookTable, HookTable]]:
        """Take hooks out of the tables. Yields each table with what was taken out."""
        for name, parameter, tables in self._tables():
            hooks: tuple[list[Any], list[Any]] = ([], [])
            # The former parameter's too: an engine may compute with it for a while.
            for pair in (self._former.get(name, ({}, {})), tables):
                for table, found in zip(pair, hooks, strict=True):
                    entries = _of_script(table)
                    for key in entries:
                        del table[key]
                    found += entries.values()
                    yield table, entries
            self._taken.append((parameter, *hooks))

    def _tables(self) -> Iterator[tuple[str, nn.Parameter, tuple[HookTable, HookTable]]]:
        for name, parameter in self._parameters.items():
            tables = _tables_of(parameter)
            if name in self._former or any(tables):
                yield name, parameter, tables

    def _check_additive(self) -> None:
        for name, parameter, (early, late) in self._tables():
            if _of_script(late):
                raise StrategyRefused(
                    f"server: {name} has a hook on its accumulated gradient, which is sent to the "
                    "servers instead. Change gradients in the loss or by run.clip_gradients, or "
                    "use ddp or zero1."
                )
            for key, hook in early.items():
                if key not in self._checked and not _is_additive(hook, parameter):
                    raise StrategyRefused(
                        f"server: {name} has a hook on its gradient, which sees the gradient of "
                        "this rank's rows here, and does not give for a sum what it gives for the "
                        "parts (a bound, a norm). Use ddp or zero1, where hooks see the gradient "
                        "of the whole batch."
                    )
                self._checked.add(key)


def _tables_of(parameter: Tensor) -> tuple[HookTable, HookTable]:
    """Return the hooks before and after a gradient is added to `.grad`."""
    return gradient_hooks(parameter), accumulation_hooks(parameter)


def _of_script(table: Mapping[int, Any]) -> dict[int, Any]:
    """Return the hooks of a table that no strategy and no engine has registered."""
    return {key: hook for key, hook in table.items() if _package(hook) not in _OWN}


def _package(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]


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
