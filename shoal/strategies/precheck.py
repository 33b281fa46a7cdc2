"""Checks of strategies against a number of ranks and a job, before any process is started.

They need no torch. Strategies make the same checks in every rank, for ranks that another launcher
has started.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.comm.parallel_dims import ParallelDims, problems
from shoal.config.job import Job
from shoal.strategies import StrategyLine
from shoal.strategies.options import (
    ONE_PROCESS,
    ONE_RANK,
    WHOLE_PARAMETERS,
    LocalOptions,
    ServerOptions,
    ZeroOptions,
    mesh_sizes,
)

OPTIMIZERS_OF_FULL_PARAMETERS = ("Adafactor",)
"""Optimizers whose step needs more of a parameter than a shard."""


def check(line: StrategyLine, ranks: int, on_machine: int | None = None) -> list[str]:
    """Return reasons why the strategies of `line` cannot run on `ranks` ranks.

    Args: on_machine: ranks on each machine, where that is known.
    """
    options = [spec.options for spec in line.specs if spec.options is not None]
    dims = ParallelDims(**mesh_sizes(options))
    return problems(dims, ranks, on_machine) or list(
        _check_data_axis(line, ranks, dims.data(ranks))
    )


def check_job(job: Job, line: StrategyLine, ranks: int, on_machine: int | None = None) -> list[str]:
    """Return the reasons of `check`, and reasons why they cannot step or save as the job says."""
    return [*check(line, ranks, on_machine), *_check_settings(job, line, ranks)]


def _check_data_axis(line: StrategyLine, world: int, ranks: int) -> Iterator[str]:
    if ranks < world and any(isinstance(spec.options, ServerOptions) for spec in line.specs):
        yield WHOLE_PARAMETERS
    if ranks > 1 and any(spec.name == "dataparallel" for spec in line.specs):
        yield ONE_PROCESS.format(ranks=ranks)
    if ranks > 1 and any(spec.name == "single" for spec in line.specs):
        yield ONE_RANK.format(ranks=ranks)


def _check_settings(job: Job, line: StrategyLine, ranks: int) -> Iterator[str]:
    optimizer = job.optimizer
    sharding = [spec.name for spec in line.specs if isinstance(spec.options, ZeroOptions)]
    if ranks > 1 and optimizer.name in OPTIMIZERS_OF_FULL_PARAMETERS and sharding:
        yield (
            f"optimizer.name: {optimizer.name} needs whole parameters, and {sharding[0]} shards "
            "them. Use ddp, or another optimizer such as AdamW."
        )
    averaging = [spec.name for spec in line.specs if isinstance(spec.options, LocalOptions)]
    if job.checkpoint.every_steps == "auto" and averaging:
        yield (
            f"checkpoint.every_steps: auto chooses by the clock, and {averaging[0]} averages the "
            "weights before each save, so the clock would change them. Give a number of steps."
        )
