"""What a strategy cannot do on so many ranks, as far as it can be told before a process is started: without torch.

Strategies refuse the same in every rank, for those who start ranks another way.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.comm.layout import Degrees, problems
from shoal.config.job import Job
from shoal.strategies import Named, named

ZERO = ("zero1", "zero2", "zero3")
TAKE_NO_SHARDS = ("Adafactor", "Rprop")


def refusals(line: str, ranks: int) -> list[str]:
    """Why `ranks` ranks are no world for the strategies of a line. Raises ConfigError: a wrong name."""
    strategies = named(line)
    found = problems(_degrees(strategies), ranks)
    return found or [
        problem for strategy in strategies for problem in _of_one(strategy, _degrees(strategies).data(ranks))
    ]


def refusals_of_job(job: Job, ranks: int) -> list[str]:
    """The same, and which optimizer the strategy cannot step there. Raises ConfigError: a wrong name."""
    return refusals(job.strategy, ranks) + (list(_of_optimizer(job)) if ranks > 1 else [])


def _degrees(strategies: list[Named]) -> Degrees:
    """As far as they are numbers; what is none is refused where strategies are made."""
    asked = {strategy.name: strategy.value or "2" for strategy in strategies if strategy.name in ("tensor", "pipeline")}
    for strategy in strategies:
        if strategy.name in ZERO:
            asked["shard"] = dict(strategy.options).get("hybrid", "0")
    return Degrees(**{axis: int(size) for axis, size in asked.items() if size.isdecimal()})


def _of_one(strategy: Named, ranks: int) -> Iterator[str]:
    if strategy.name == "single" and ranks > 1:
        yield f"strategy single trains on one rank; there are {ranks}. Use ddp, or start one process."


def _of_optimizer(job: Job) -> Iterator[str]:
    names, optimizer = [strategy.name for strategy in named(job.strategy)], job.optimizer
    if optimizer.in_backward and "ddp" in names:
        yield (
            "optimizer.in_backward: ddp on several ranks keeps all gradients anyway. Use strategy zero1, zero2 or "
            "zero3, or optimizer.in_backward=false."
        )
    sharding = [name for name in names if name in ZERO]
    if optimizer.name in TAKE_NO_SHARDS and sharding:
        yield (
            f"optimizer.name: {optimizer.name} needs whole parameters, and {sharding[0]} shards them. Use ddp, or "
            "another optimizer such as AdamW."
        )
