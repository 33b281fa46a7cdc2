"""`shoal.plan`: the planner for a model of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.costs import cluster as clusters
from shoal.errors import ConfigError
from shoal.planner.find_machine import find_machine, one_machine
from shoal.planner.plan_report import report
from shoal.planner.smallest_change import Command
from shoal.planner.strategy_search import Plan, Planner, Plans, Workload
from shoal.planner.trace_model import trace_model


@dataclass(frozen=True)
class PlanResult:
    """Plans of a model, best first.

    `print(result)` shows the table that `shoal plan` prints.

    Attributes:
        plans: all plans, and why others are none.
        best: the plan to use; None if nothing fits.
    """

    planner: Planner
    plans: Plans

    @property
    def best(self) -> Plan | None:
        return self.plans.best

    def __str__(self) -> str:
        return report(self.planner, self.plans, Command(words=("train.py",)))


def plan(
    model: nn.Module,
    optimizer: Optimizer,
    sample: Any,
    compute_loss: Callable[..., Any],
    *,
    ranks: int = 1,
    batch_size: int | None = None,
    accumulate: int = 1,
    memory: str | float | None = None,
    machine: str = "",
    cluster: str | Path | None = None,
) -> PlanResult:
    """Predict the memory and the time of every strategy for a model. Trains nothing.

    The model's step is followed on tensors without memory: its values are neither read nor
    changed, and it may lie on the meta device.

    Args:
        optimizer: of the model's parameters.
        sample: a batch as `compute_loss` takes it: a tuple of tensors with the batch in dimension
            0. Only shapes and dtypes are used.
        compute_loss: called as `compute_loss(*sample)`; calls the model, returns the mean loss.
        ranks: of the plan, on one host; with `cluster`, those of the file.
        batch_size: samples of a step over all ranks; None for those of `sample`.
        memory: of each rank, such as "16GiB", or bytes; None for what the machine has.
        machine: a preset such as "h100", or a file of `shoal calibrate`; "" for this machine.

    Raises:
        ConfigError: a bad quantity, machine or cluster file.
        UsageError: the model cannot run without values.
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    problems = []
    limit = None
    if memory is not None:
        try:
            limit = clusters.read_size(memory)
        except ValueError as error:
            problems.append(f"memory={memory}: {error}")
    size = batch_size or len(inputs[0])
    if ranks < 1 or size < 1 or accumulate < 1:
        problems.append(f"ranks={ranks}, batch_size={size}, accumulate={accumulate}: from 1 on")
    if problems:
        raise ConfigError(*problems)
    hosts = clusters.load(Path(cluster)) if cluster is not None else None
    on_host = hosts.ranks_per_host if hosts else ranks
    speeds = find_machine(machine or (hosts.machine if hosts else ""), on_host)
    work = trace_model(model, compute_loss, lambda _: optimizer, inputs)
    planner = Planner(
        Workload(work, model, size, accumulate), speeds, hosts or one_machine(speeds, ranks), limit
    )
    return PlanResult(planner, planner.search())
