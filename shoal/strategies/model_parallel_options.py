"""Options of the strategies that divide the model, as `options.py` has those of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import ConfigError, raise_problems
from shoal.strategies.options import StrategyOptions, divisors
from shoal.strategies.pipeline.schedules import SCHEDULES, problems

MANY_RANKS = 16
"""Ranks of a pipeline above which `shoal plan` compares its default schedule alone."""


@dataclass(frozen=True)
class PipelineOptions(StrategyOptions):
    """Options of pipeline parallelism.

    Args:
        ranks: ranks of each pipeline.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zbv. `shoal schedule NAME` draws
            it.
        microbatches: micro-batches of the local batch; 0 to choose.
        stages: stages on each rank, for interleaved and zero-bubble; 0 for the schedule's default.
        balance: time (forward and backward, measured on a sample) or parameters.
        cuts: names of the modules that begin stages, as in layer2.0/layer4; empty to balance.
    """

    value: ClassVar[str] = "ranks"
    ranks: int = 2
    schedule: str = "1f1b"
    microbatches: int = 0
    stages: int = 0
    balance: str = "time"
    cuts: str = ""

    def __post_init__(self) -> None:
        messages = []
        if self.balance not in ("time", "parameters"):
            messages.append(f"balance={self.balance}: by time or by parameters")
        if self.microbatches < 0:
            messages.append(f"microbatches={self.microbatches}: must not be negative; 0 to choose")
        # 0 is resolved later. Every schedule has a table for one micro-batch, so check that.
        messages += problems(self.schedule, self.ranks, max(self.microbatches, 1), self.stages)
        if self.cuts and self.schedule in SCHEDULES:
            num_stages = self.ranks * (self.stages or SCHEDULES[self.schedule].per_rank)
            num_cuts = len(self.cuts.split("/"))
            if num_cuts != num_stages - 1:
                need = f"names begin as many stages; {num_stages} stages need {num_stages - 1}"
                messages.append(f"cuts={self.cuts}: {num_cuts} {need}")
        raise_problems(messages)

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"pipeline": self.ranks}

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        others = ("gpipe", "interleaved", "zero-bubble", "zbv")
        schedules = [f",schedule={schedule}" for schedule in others]
        # Tables of long pipelines take seconds to make, and schedules differ by their bubbles.
        return [
            f"{name}={p}{schedule}"
            for p in divisors(ranks)
            for schedule in ["", *(schedules if p <= MANY_RANKS else [])]
        ]


@dataclass(frozen=True)
class TensorOptions(StrategyOptions):
    """Options of tensor parallelism.

    Args:
        degree: ranks in each tensor group. Divides the world size, and the ranks of each machine.
        whole: patterns of module names, with + between them. These modules are replicated, with all
            modules inside.
        sequence: sequence parallel: activations between divided layers are sharded along the
            sequence.
    """

    value: ClassVar[str] = "degree"
    degree: int = 2
    whole: str = ""
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.degree <= 0:
            raise ConfigError([f"tensor={self.degree}: must be 1 or more"])

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"tensor": self.degree}

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        degrees = [f"{name}={degree}" for degree in divisors(ranks)]
        return [text + option for text in degrees for option in ("", ",sequence=true")]
