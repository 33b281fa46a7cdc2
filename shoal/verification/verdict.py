"""What a user calls, and what comes back: exact, by how much not, or refused."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from shoal.errors import UsageError
from shoal.strategies import StrategyLine, build_strategies, parse_line
from shoal.strategies.base import LossFunction
from shoal.strategies.precheck import check
from shoal.testing import world
from shoal.verification import buffer_check
from shoal.verification.batches import BatchFunction, loader_of
from shoal.verification.trajectory import Experiment, RankReport, run_reference, run_strategy

TOLERANCE = 1e-10
WORST = 5


@dataclass(frozen=True)
class Verdict:
    """Whether a strategy trains this model as one process does.

    Attributes: verdict: "exact": every gradient, loss, weight and buffer is within `tolerance`.
        "differs by design": some are
            not, and `reasons` says why. "differs": they should be. "refused": the strategy does not
            take the model, `reasons`.
        max_relative_error: of the worst tensor; each error is relative to its tensor's largest
        entry.
        worst: the worst tensors, (what, error), the worst first.
    """

    strategy: str
    ranks: int
    accumulate: int
    steps: int
    tolerance: float
    verdict: Literal["exact", "differs by design", "differs", "refused"]
    max_relative_error: float | None
    worst: list[tuple[str, float]]
    reasons: list[str]

    @property
    def worst_parameter(self) -> str | None:
        """What `max_relative_error` belongs to."""
        return self.worst[0][0] if self.worst else None

    def to_json(self) -> dict[str, Any]:
        """JSON values; an error that is no number is null."""
        finite = [{"what": what, "relative_error": _finite(error)} for what, error in self.worst]
        return {
            **vars(self),
            "max_relative_error": _finite(self.max_relative_error),
            "worst": finite,
        } | {"worst_parameter": self.worst_parameter}

    def __str__(self) -> str:
        """For people: the worst tensors, then the verdict."""
        lines = [f"{error:8.1e}  {what}" for what, error in self.worst]
        lines += [f"note: {reason}" for reason in self.reasons]
        parts = f" in {self.accumulate} parts" if self.accumulate > 1 else ""
        over = f"{self.strategy}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{parts}, {self.steps} steps"
        size = (
            ""
            if self.max_relative_error is None
            else f": largest relative error {self.max_relative_error:.1e}"
        )
        return "\n".join([*lines, f"{over}: {self.verdict}{size}"])


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: BatchFunction,
    loss_fn: LossFunction,
    strategy: str = "ddp",
    ranks: int = 2,
    *,
    steps: int = 5,
    accumulate: int = 1,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Train on `ranks` processes of this machine and on one, in float64 on the CPU, and compare.

    Both start from the weights that `model_fn` gives under seed 0, and see the same global batches.

    Args: model_fn: makes the model. All three functions stand at the top of a module, which every
        process imports. batch_fn: step, from 0 -> (*inputs, target), a global batch with samples in
        dimension 0; a nest of tensors. loss_fn: as for `Run.forward_backward`. strategy: as for
        `shoal.init`. steps: optimizer steps, SGD with momentum. tolerance: relative.

    Raises: ConfigError: no such strategy. LaunchError: a process failed; holds its traceback.
    """
    experiment = Experiment(model_fn, partial(loader_of, batch_fn, steps), loss_fn, steps)
    return verify_job(experiment, strategy, ranks, accumulate=accumulate, tolerance=tolerance)


def verify_job(
    experiment: Experiment,
    strategy: str | StrategyLine,
    ranks: int,
    *,
    accumulate: int = 1,
    tolerance: float = TOLERANCE,
    timeout_s: float = 3600.0,
) -> Verdict:
    """`verify` for an experiment with a loader of its own."""
    if ranks < 1 or accumulate < 1 or experiment.steps < 1:
        raise UsageError(
            f"ranks={ranks}, accumulate={accumulate}, steps={experiment.steps}: each must be at "
            "least 1."
        )
    line = parse_line(strategy) if isinstance(strategy, str) else strategy
    build_strategies(line)  # what is wrong with it is said here, once
    if refused := check(line, ranks):
        return Verdict(
            line.text, ranks, accumulate, experiment.steps, tolerance, "refused", None, [], refused
        )
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        reference = Path(folder, "reference.pt")
        world.run(1, run_reference, experiment, reference, timeout_s=timeout_s)
        found = world.run(
            ranks, run_strategy, experiment, line.text, accumulate, reference, timeout_s=timeout_s
        )
    return _verdict(found, line.text, accumulate, experiment.steps, tolerance)


def _verdict(
    found: list[RankReport], strategy: str, accumulate: int, steps: int, tolerance: float
) -> Verdict:
    asked = (strategy, len(found), accumulate, steps, tolerance)
    refusals = [rank.refusal for rank in found if rank.refusal is not None]
    if refusals:
        return Verdict(*asked, "refused", None, [], refusals[:1])
    errors = {what: _worst(what, found) for what in found[0].errors}
    worst = sorted(errors.values(), key=lambda item: _sort_key(item[1]), reverse=True)
    beyond = [what for what, (_, error) in errors.items() if _sort_key(error) > tolerance]
    if not beyond:
        return Verdict(*asked, "exact", worst[0][1], worst[:WORST], [])
    reasons = _reasons(beyond, found)
    return Verdict(
        *asked, "differs by design" if reasons else "differs", worst[0][1], worst[:WORST], reasons
    )


def _reasons(beyond: list[str], found: list[RankReport]) -> list[str]:
    """What excuses all that is beyond the tolerance, if anything does."""
    notes = [note for rank in found for note in rank.notes]
    by_rank = [what for what in beyond if what in found[0].by_rank]
    if by_rank and (found[0].buffers_read or notes or len(by_rank) == len(beyond)):
        notes.append(buffer_check.note(by_rank))
    return notes


def _worst(what: str, found: list[RankReport]) -> tuple[str, float]:
    """The largest error of one thing over all ranks, and the rank where they do not agree."""
    errors = [rank.errors[what] for rank in found]
    largest = max(errors, key=_sort_key)
    return what if len(set(errors)) == 1 else f"{what}, on rank {errors.index(largest)}", largest


def _sort_key(error: float) -> float:
    """A NaN is the worst of all, and no comparison finds it."""
    return math.inf if math.isnan(error) else error


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None
