"""The lists of tensors that a step of torch's optimizers works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def change_step_lists(
    optimizer: Optimizer,
    change: Callable[[tuple[list[Tensor | None], ...]], None],
    between: Callable[[], None],
) -> None:
    """Let `change` be given the lists that a step of an optimizer collects for each of its groups:
    parameters, gradients, and its state of each, such as exponential averages. It may replace their
    entries. A differentiable step is left alone.

    Args:
        optimizer: of a class of torch that collects such lists.
        between: is called before lists are collected, and after a step, before its hooks.

    Why: torch steps DTensors one operation after the other through its dispatcher in Python, and
    has no public place between a parameter's state and the arithmetic. Without: a step of ZeRO or
    tensor parallelism takes several times as long. Checked: 2.13.
    """
    bound: Any = optimizer
    collect, end = bound._init_group, bound._optimizer_step_code

    def collect_and_change(group: dict[str, Any], *lists: list[Tensor | None]) -> Any:
        between()
        answer = collect(group, *lists)
        if not group.get("differentiable"):
            change(lists)
        return answer

    def end_of_step() -> None:
        between()
        end()

    bound._init_group, bound._optimizer_step_code = collect_and_change, end_of_step
