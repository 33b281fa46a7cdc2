"""The verdict of a proof: exact, different, different by design, or refused."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader

from shoal.data.batch_fetcher import identity_collate
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.run.preparation import Draws
from shoal.run.supervised import LossFunction
from shoal.strategies import StrategyLine, build_strategies, parse_line
from shoal.strategies.options import LocalOptions, PipelineOptions, ServerOptions
from shoal.strategies.precheck import check
from shoal.testing import world
from shoal.verification.script.script_report import finite
from shoal.verification.trajectory import Experiment, RankReport, run_reference, run_strategy

TOLERANCE = 1e-10
MAX_WORST = 5  # worst tensors in a verdict
MOST_RANKS = 1 << 10
"""Processes of one machine that a proof may start."""


@dataclass(frozen=True)
class Verdict:
    """The result of training a model under a strategy and in one process.

    Attributes:
        strategy: the strategy, as it was given.
        ranks: the number of ranks.
        accumulate: micro-batches of each local batch.
        steps: optimizer steps.
        tolerance: the largest relative error that counts as exact.
        verdict: "exact": every gradient, loss, weight and buffer is within `tolerance`. "differs
            by design": some are not, and `reasons` says why. "differs": some are not, which is a
            bug. "refused": the strategy does not accept the model, and `reasons` says why.
        max_relative_error: that of the worst tensor, relative to the tensor's largest entry; None
            where it was refused.
        worst: descriptions and errors of the worst tensors, the worst first.
        reasons: see `verdict`.
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
        """Return the description of the tensor with `max_relative_error`."""
        return self.worst[0][0] if self.worst else None

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON. An error that is infinite or NaN is None."""
        worst = [{"what": name, "relative_error": finite(error)} for name, error in self.worst]
        return {
            **vars(self),
            "max_relative_error": finite(self.max_relative_error),
            "worst": worst,
            "worst_parameter": self.worst_parameter,
        }

    def __str__(self) -> str:
        """Return lines for the user: the worst tensors, the reasons, then the verdict."""
        lines = [f"{error:8.1e}  {name}" for name, error in self.worst]
        lines += [f"note: {reason}" for reason in self.reasons]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        parts = f" in {self.accumulate} parts" if self.accumulate > 1 else ""
        size = ""
        if self.max_relative_error is not None:
            size = f": largest relative error {self.max_relative_error:.1e}"
        lines.append(f"{self.strategy}, {ranks}{parts}, {self.steps} steps: {self.verdict}{size}")
        return "\n".join(lines)


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

    Both start from the weights that `model_fn` returns under seed 0, and train on the same global
    batches. All three functions must stand at the top of a module, which every process imports.

    Args:
        model_fn: returns the model.
        batch_fn: step, from 0 -> (*inputs, target), a global batch: tensors or nests of tensors,
            with samples in dimension 0.
        loss_fn: (output, target) -> the mean over the batch, or `shoal.counted(sum, count)`.
        strategy: as for `shoal.init`.
        ranks: the number of processes that train under the strategy.
        steps: optimizer steps, by SGD with momentum.
        accumulate: micro-batches of each local batch.
        tolerance: the largest relative error that counts as exact.

    Raises:
        ConfigError: there is no such strategy.
        UsageError: an argument is of the wrong kind, or `ranks`, `steps` or `accumulate` is below
            1, or a function cannot be sent to other processes.
        LaunchError: a process failed; the message has its traceback.
    """
    functions = {"model_fn": model_fn, "batch_fn": batch_fn, "loss_fn": loss_fn}
    counts = {"ranks": ranks, "steps": steps, "accumulate": accumulate}
    if problems := list(_problems(functions, counts, strategy, tolerance)):
        raise UsageError("\n".join(problems))
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
    """Do the same as `verify`, for an experiment with a data loader.

    Args: timeout_s: for each of the two runs.
    """
    if ranks < 1 or accumulate < 1 or experiment.steps < 1:
        raise UsageError(
            f"ranks={ranks}, accumulate={accumulate}, steps={experiment.steps}: each must be at "
            "least 1."
        )
    line = parse_line(strategy) if isinstance(strategy, str) else strategy
    build_strategies(line)  # its errors are raised here, once, and not in every rank
    if refusals := check(line, ranks):
        return Verdict(
            line.text, ranks, accumulate, experiment.steps, tolerance, "refused", None, [], refusals
        )
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        reference = Path(folder, "reference.pt")
        world.run(1, run_reference, experiment, reference, timeout_s=timeout_s)
        settings = (ranks, run_strategy, experiment, line.text, accumulate, reference)
        draws = draws_of(line)
        reports = world.run(*settings, draws, timeout_s=timeout_s)
        if any((report.refusal or "").startswith('draws="global"') for report in reports):
            reports = world.run(*settings, timeout_s=timeout_s)
    return _verdict(reports, line.text, accumulate, experiment.steps, tolerance)


def draws_of(line: StrategyLine) -> Draws:
    """Return "global" if ranks of these strategies can draw the random numbers of one device."""
    for spec in line.specs:
        found = spec.options
        if isinstance(found, PipelineOptions | LocalOptions):
            return "rank"
        if isinstance(found, ServerOptions) and found.staleness.strip("0"):
            return "rank"
    return "global"


def _verdict(
    reports: list[RankReport], strategy: str, accumulate: int, steps: int, tolerance: float
) -> Verdict:
    settings = (strategy, len(reports), accumulate, steps, tolerance)
    refusals = [report.refusal for report in reports if report.refusal is not None]
    if refusals:
        return Verdict(*settings, "refused", None, [], refusals[:1])
    errors = {name: _worst_rank(name, reports) for name in reports[0].errors}
    worst = sorted(errors.values(), key=lambda item: _sort_key(item[1]), reverse=True)
    beyond = [name for name, (_, error) in errors.items() if _sort_key(error) > tolerance]
    if not beyond:
        return Verdict(*settings, "exact", worst[0][1], worst[:MAX_WORST], [])
    reasons = [note for report in reports for note in report.notes]
    by_rank = [name for name in beyond if name in reports[0].by_rank]
    # Buffers that no training step reads explain only themselves, and no other error.
    if by_rank and (reports[0].buffers_read or reasons or len(by_rank) == len(beyond)):
        reasons.append(buffer_note(by_rank))
    verdict: Literal["differs by design", "differs"] = "differs by design" if reasons else "differs"
    return Verdict(*settings, verdict, worst[0][1], worst[:MAX_WORST], reasons)


def buffer_note(names: list[str]) -> str:
    """Return a sentence that explains why these buffers differ."""
    first, *others = names
    more = f" and {len(others)} more" if others else ""
    return (
        f"{first}{more}: the forward pass updates it from the samples that one rank computes at "
        "once, and rank 0's value is evaluated and saved, so it differs from one device by design."
    )


def _worst_rank(name: str, reports: list[RankReport]) -> tuple[str, float]:
    """Return the largest error over all ranks, with its rank where the ranks differ."""
    errors = [report.errors[name] for report in reports]
    largest = max(errors, key=_sort_key)
    if len(set(errors)) > 1:
        name = f"{name}, on rank {errors.index(largest)}"
    return name, largest


def _sort_key(error: float) -> float:
    """Return the error; infinity for NaN, which every comparison would overlook."""
    return math.inf if math.isnan(error) else error


def _problems(
    functions: Mapping[str, Any], counts: Mapping[str, Any], strategy: Any, tolerance: Any
) -> Iterator[str]:
    """Yield a sentence for each argument that cannot be meant.

    Args:
        functions: each is to stand at the top of a module.
        counts: integers; `verify_job` refuses those below 1.
    """
    for name, function in functions.items():
        if not callable(function):
            yield f"{name}: {function!r} is no function"
        elif not _can_be_sent(function):
            yield (
                f"{name}: {function!r} must be a function at the top of a module, from which "
                "every process imports it"
            )
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            yield f"{name}: {count!r} is no integer"
        elif name == "ranks" and count > MOST_RANKS:
            yield f"{name}={count}: it must be at most {MOST_RANKS:,}, which are processes here"
    if not isinstance(strategy, str):
        yield f'strategy: {strategy!r} is no text such as "ddp" or "tensor=2,zero1"'
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not math.isfinite(tolerance) or tolerance < 0:
        yield f"tolerance: {tolerance!r} is no number from 0 on, such as 1e-10"


def _can_be_sent(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


BatchFunction = Callable[[int], tuple[Any, ...]]
"""Step, from 0 -> a global batch: the inputs, then the target. Each is a tensor or a nest of
tensors, with samples in dimension 0.
"""


def loader_of(batch_fn: BatchFunction, steps: int) -> DataLoader:
    """Return a loader of the batches 0 to steps - 1, in this order.

    Raises:
        UsageError: a batch differs in size from the others (only the last one may be smaller), or
            the tensors of one batch have different lengths.
    """
    batches: Any = [batch_fn(step) for step in range(steps)]
    lengths = [_length(batch, step) for step, batch in enumerate(batches)]
    if any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
        raise UsageError(
            f"batch_fn gave batches of {', '.join(map(str, lengths))} samples; all must have the "
            "same number, only the last one may have fewer."
        )
    return DataLoader(batches, batch_size=None, shuffle=False, collate_fn=identity_collate)


def _length(batch: tuple[Any, ...], step: int) -> int:
    """Return the number of samples of a batch. Raises UsageError for a malformed batch."""
    # Scalars belong to the batch, not to a sample.
    lengths = sorted({len(tensor) for tensor in tensors_in(batch) if tensor.dim()})
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or len(lengths) != 1:
        raise UsageError(
            f"batch_fn({step}) must give (*inputs, target), all with samples in dimension 0; it "
            f"gave a {type(batch).__name__} of tensors with "
            f"{', '.join(map(str, lengths)) or 'no'} rows."
        )
    return lengths[0]
