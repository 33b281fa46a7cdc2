"""The calls of a user's function in a step, and what crosses the cuts: the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalBatch
from shoal.strategies.pipeline.absent import WalkRefusal
from shoal.strategies.pipeline.division import (
    DividedModel,
    code_key,
    refusals_as_errors,
    shape_key,
)
from shoal.strategies.pipeline.dry_run import digest
from shoal.strategies.pipeline.stage_map import Crossing


class StageCall(NamedTuple):
    """The user's function with the arguments of one micro-batch.

    Attributes:
        key: what determines the shapes of all values.
        seed: of its random numbers.
    """

    function: Callable[[], Any]
    key: Hashable
    seed: int

    @classmethod
    def of(cls, model: nn.Module, micro: LocalBatch, seed: int) -> StageCall:
        """Return the call of a micro-batch, for a training step."""
        function = micro.function
        return cls(
            partial(function, *micro.args, **micro.kwargs),
            (code_key(function), shape_key(model, (micro.args, micro.kwargs))),
            seed,
        )


class PlannedCall(NamedTuple):
    """A call of which it is known what crosses the cuts."""

    call: StageCall
    crossing: Crossing


class CallPlanner:
    """Finds what crosses the cuts of a model, together with the other ranks of a pipeline.

    Args:
        divided: the user's model.
        axis: the pipeline axis.
    """

    def __init__(self, divided: DividedModel, axis: Axis) -> None:
        self.divided = divided
        self.axis = axis

    def plan(self, calls: Sequence[StageCall]) -> list[PlannedCall]:
        """Find what crosses the cuts, for each call. Collective if one needs a dry run.

        Raises: StrategyRefused: the function cannot be divided, or ranks have gone other ways.
        """
        is_known = all(self.divided.knows(call.key) for call in calls)
        crossings: list[Crossing] = []
        failure: BaseException | None = None
        try:
            for call in calls:
                crossings.append(self.divided.crossing(call.function, call.key, call.seed))
        except (WalkRefusal, Exception) as error:  # noqa: BLE001 - of the user's function
            failure = error
        if not is_known:
            self._compare_over_pipeline(crossings, failure)
        if failure is not None:
            with refusals_as_errors():
                raise failure
        return [PlannedCall(*pair) for pair in zip(calls, crossings, strict=True)]

    def _compare_over_pipeline(
        self, crossings: Sequence[Crossing], failure: BaseException | None
    ) -> None:
        own = json.dumps([str(failure or ""), [digest(crossing) for crossing in crossings]])
        found = [json.loads(text) for text in self.axis.all_gather_str(own)]
        refusal = next((text for text, _ in found if text), "")
        if failure is None and refusal:
            raise StrategyRefused(f"another rank of the pipeline says: {refusal}")
        if refusal:
            return
        for rank, (_, digests) in enumerate(found):
            if digests != found[0][1]:
                raise StrategyRefused(
                    f"pipeline: ranks 0 and {rank} of a pipeline take other ways through the "
                    "function, for the same batch. It must not depend on the rank, the time or "
                    "random numbers other than those of torch."
                )
