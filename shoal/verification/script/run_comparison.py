"""Two recorded runs of a script, that of one process and that of many ranks, compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.verification.script.likely_cause import likely_cause
from shoal.verification.script.loader_batches import axes_of_batches, repeat_samples
from shoal.verification.script.printed_figures import other_figures
from shoal.verification.script.run_record import RankRecord, read_run
from shoal.verification.script.script_report import (
    BY_DESIGN,
    ScriptCause,
    ScriptDifference,
    ScriptReport,
    ScriptVerdict,
)
from shoal.verification.script.step_comparison import EXACT, RecordedRun, StepComparison
from shoal.verification.script.written_files import compare_files

OWN_STEPS = ScriptCause(
    "own steps",
    "the strategy lets each rank step with gradients of its own, and brings them together later.",
)
NO_GROUP = (
    "the script starts no process group, so each rank trains alone. Make it one of many ranks by "
    "Shoal's four lines, as in docs/lessons/3-your-own-script.md, or by DistributedDataParallel."
)
SAME_BATCHES = (
    "all ranks took the same batches. That is right for tensor and pipeline parallelism; in data "
    "parallelism it means that nothing shares the samples out."
)
SAME_DRAWS = (
    "the data ranks draw the same random numbers, so row i of each has the same dropout masks. "
    "That is no error, and the masks vary less than on one device: seed each rank on its own once "
    "the model is made, torch.manual_seed(seed + rank)."
)
OF_OTHER_SAMPLES = ("wrong output", "loss", "wrong gradient", "weights of samples")
"""Causes that are found as well where the model was given other samples."""
OTHER_DRAWS = (
    "random numbers are drawn {place}, and the ranks draw others than one device. A defect in what "
    "is computed from them does not show beside that: {cure}, and compare again."
)
CURE_IN_LOOP = "draw them in the data set's __getitem__, or by torch inside of compute_loss"
CURE_IN_MODEL = (
    "leave them out, or give the loss as a function to run.forward_backward, which is compared "
    "with the numbers of one device"
)
MAX_OTHERS = 20  # differences beside the first one in a report


def _notes(reference: RecordedRun, candidate: RecordedRun) -> list[str]:
    """Return sentences about the two runs, beside their differences."""
    ranks = candidate.ranks
    records = (*ranks, *reference.ranks)
    notes = list(dict.fromkeys(note for record in records for note in record.notes))
    is_own = ranks[0].has_group and not ranks[0].by_shoal
    if is_own and len(ranks) > 1 and ranks[0].axis("data")[1] == 1:
        notes.append(SAME_BATCHES)
    # Two data ranks may have had one state of the random numbers at their first dropout.
    draws = {record.axis("data")[0]: record.draws for record in ranks if record.draws}
    if len({*draws.values()}) < len(draws):
        notes.append(SAME_DRAWS)
    count = min(reference.steps, candidate.steps)
    if count and reference.steps != candidate.steps:
        notes.append(
            f"the ranks took {candidate.steps} steps and one process {reference.steps}; the first "
            f"{count} are compared."
        )
    figures = other_figures(reference.folder / "rank-0", candidate.folder / "rank-0", len(ranks))
    return [*notes, figures] if figures else notes


def compare_runs(
    reference_dir: str | Path,
    candidate_dir: str | Path,
    tolerance: float = EXACT,
) -> ScriptReport:
    """Compare the record of a run on many ranks with that of one process.

    Steps are compared in their order, and in a step outputs, the loss, gradients from the last
    layer to the first, weights and buffers. The first difference beyond the tolerance decides.

    Args:
        reference_dir: the record of one process.
        candidate_dir: the record of the run on many ranks.
        tolerance: the relative error that counts as rounding.

    Raises: RecordError: a folder holds no complete record.
    """
    reference = RecordedRun(Path(reference_dir), read_run(Path(reference_dir)))
    candidate = RecordedRun(Path(candidate_dir), read_run(Path(candidate_dir)))
    ranks = candidate.ranks
    if not ranks[0].by_shoal:
        for record, axes in zip(ranks, axes_of_batches(candidate.folder, ranks), strict=True):
            record.axes = axes
    count = min(reference.steps, candidate.steps)
    plain = ScriptReport("nothing compared", len(ranks), notes=_notes(reference, candidate))
    refusals = [r.refusal for r in (*reference.ranks, *ranks) if r.refusal is not None]
    if refusals:
        return replace(plain, verdict="refused", notes=refusals[:1])
    if count == 0:
        return plain
    found, steps = _until_difference(reference, candidate, count, tolerance)
    if found and len(ranks) > 1 and not (ranks[0].by_shoal or ranks[0].has_group):
        return replace(plain, notes=[*plain.notes, NO_GROUP])
    files: dict[str, float] = {}
    if not found:
        one, many = (Path(run.folder, "rank-0", "files") for run in (reference, candidate))
        files = compare_files(one, many)
        found = [
            ScriptDifference(count, "files", None, name, error, tolerance)
            for name, error in files.items()
            if not error <= tolerance
        ]
    largest = max((error for step in steps for error in step.errors.values()), default=None)
    report = replace(
        plain,
        verdict="exact",
        steps=count,
        files=len(files),
        largest=largest,
        layers=list(_layers(steps[-1])),
    )
    if not found:
        return report
    first = found[0]
    at = [step for step in steps if step.step <= first.step]
    cause = _cause(first, found, at, ranks)
    verdict: ScriptVerdict = "differs by design" if cause.kind in BY_DESIGN else "differs"
    others = found[1 : 1 + MAX_OTHERS]
    return replace(report, verdict=verdict, first=first, cause=cause, others=others)


def _cause(
    first: ScriptDifference,
    found: list[ScriptDifference],
    steps: list[StepComparison],
    ranks: list[RankRecord],
) -> ScriptCause:
    if not ranks[0].is_synchronous:
        return OWN_STEPS
    cause = likely_cause(first, found, steps, len(ranks))
    if cause.kind not in OF_OTHER_SAMPLES:
        return cause
    generator = next((record.draws_of_loop for record in ranks if record.draws_of_loop), "")
    place = f"by the loop for its samples, by {generator}" if generator else ""
    place, cure = place or _place_of_draws(first, ranks), CURE_IN_LOOP if place else CURE_IN_MODEL
    text = OTHER_DRAWS.format(place=place, cure=cure)
    return ScriptCause("random numbers", text) if place else cause


def _place_of_draws(first: ScriptDifference, ranks: list[RankRecord]) -> str:
    """Return where the ranks drew random numbers for what differs first, in words; "" if not."""
    steps = [record.steps[first.step - 1] for record in ranks]
    if first.phase != "forward":
        is_drawn = any(step.draws_in_loss for step in steps)
        return "between the model's outputs and the backward pass" if is_drawn else ""
    calls = [call for step in steps for call in step.calls if call.module == first.module]
    is_drawn = any(call.draws for call in calls)
    return f"in {first.module or 'the model'}, or just before it" if is_drawn else ""


def _until_difference(
    reference: RecordedRun, candidate: RecordedRun, count: int, tolerance: float
) -> tuple[list[ScriptDifference], list[StepComparison]]:
    """Return the differences of the first step that has any, and all steps up to it.

    A buffer that differs is no reason to stop: it may be one that no step reads.
    """
    ranks, first = candidate.ranks, StepComparison(reference, candidate, 1, tolerance)
    if not ranks[0].by_shoal and repeat_samples(candidate.folder, ranks):
        line = ranks[0].steps[0].calls[-1].line
        repeated = ScriptDifference(1, "batches", None, None, 1 - 1 / len(ranks), 0.0, line)
        return [repeated], [first]
    if apart := first.apart("start"):
        return [
            ScriptDifference(1, "start", name.rpartition(".")[0], name, error, tolerance)
            for name, error in apart.items()
        ], [first]
    steps: list[StepComparison] = []
    buffers: list[ScriptDifference] = []
    for number in range(1, count + 1):
        step = StepComparison(reference, candidate, number, tolerance)
        steps.append(step)
        found = step.compare()
        others = [difference for difference in found if difference.phase != "buffers"]
        if others:
            # A wrong buffer may be why the output of a later step is wrong.
            module = others[0].module if others[0].phase == "forward" else None
            return [b for b in buffers if b.module == module] + others, steps
        buffers += found
    return buffers, steps


def _layers(step: StepComparison) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield (module, worst error of its outputs, of its own parameters' gradients)."""
    gradients: dict[str, float] = {}
    for key, error in step.errors.items():
        if key.startswith("gradient/"):
            module = key.removeprefix("gradient/").rpartition(".")[0]
            gradients[module] = max(error, gradients.get(module, 0.0))
    forward: dict[str, float | None] = {}
    for index, call in enumerate(step.calls):
        errors = [step.errors.get(f"forward/{index}/{o}") for o in range(call.outputs)]
        known = [e for e in (forward.get(call.module), *errors) if e is not None]
        forward[call.module] = max(known, default=None)
    for module, worst in forward.items():
        yield module, worst, gradients.get(module)
