"""What a strategy cannot do on so many ranks, as far as it can be told before a process is started:
without torch.

Strategies refuse the same in every rank, for those who start ranks another way.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.comm.parallel_dims import ParallelDims, problems
from shoal.config.job import Job
from shoal.strategies import StrategyLine
from shoal.strategies.options import ZeroOptions, mesh_sizes

TAKE_NO_SHARDS = ("Adafactor", "Rprop")


def check(line: StrategyLine, ranks: int) -> list[str]:
    """Return reasons why `ranks` ranks are no world for the strategies of a line."""
    degrees = _degrees(line)
    return problems(degrees, ranks) or list(_check_world_of_one(line, degrees.data(ranks)))


def check_job(job: Job, line: StrategyLine, ranks: int) -> list[str]:
    """Return the same for a job with this line, and refuse optimizers that it cannot step."""
    return check(line, ranks) + (list(_check_optimizer(job, line)) if ranks > 1 else [])


def _degrees(line: StrategyLine) -> ParallelDims:
    """Sizes of the mesh axes that the strategies span."""
    return ParallelDims(
        **mesh_sizes(spec.options for spec in line.specs if spec.options is not None)
    )


def _check_world_of_one(line: StrategyLine, ranks: int) -> Iterator[str]:
    if ranks > 1 and any(spec.name == "single" for spec in line.specs):
        yield f"strategy single trains on one rank; there are {ranks}. Use ddp, or start one process."


def _check_optimizer(job: Job, line: StrategyLine) -> Iterator[str]:
    optimizer = job.optimizer
    if optimizer.in_backward and any(spec.name == "ddp" for spec in line.specs):
        yield (
            "optimizer.in_backward: ddp on several ranks keeps all gradients anyway. Use strategy "
            "zero1, zero2 or "
            "zero3, or optimizer.in_backward=false."
        )
    sharding = [spec.name for spec in line.specs if isinstance(spec.options, ZeroOptions)]
    if optimizer.name in TAKE_NO_SHARDS and sharding:
        yield (
            f"optimizer.name: {optimizer.name} needs whole parameters, and {sharding[0]} shards "
            "them. Use ddp, or "
            "another optimizer such as AdamW."
        )
