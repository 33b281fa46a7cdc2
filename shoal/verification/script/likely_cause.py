"""The likely cause of the first difference, from its phase and from ratios of gradients.

all gradients one multiple               a scale: ranks, micro-batches, clipping
gradients differ between ranks           a missing reduction
rows of the outputs weighted otherwise   weights of samples: a mean of means
one layer on, all before it wrong        that layer's backward pass
gradients right, weights wrong           the update
"""

from __future__ import annotations

import math

from shoal.verification.script.gradient_ratios import (
    GradientRatio,
    common_factor,
    in_words,
    is_sum_of,
    ratios,
    row_factors,
)
from shoal.verification.script.script_report import ScriptCause, ScriptDifference
from shoal.verification.script.step_comparison import ROWS, StepComparison

NO_CAUSE = ScriptCause("none", "")
SAME_SAMPLES = (
    "all ranks compute the same outputs of the same samples and send nothing on the way, so they "
    "take the step that one of them would take alone: give the loader a sampler that knows the "
    "rank, such as DistributedSampler."
)
DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "DropPath")


def likely_cause(
    first: ScriptDifference,
    found: list[ScriptDifference],
    steps: list[StepComparison],
    ranks: int,
) -> ScriptCause:
    """Return the likely cause of `first`.

    Args:
        first: the first difference.
        found: all differences of its step.
        steps: the compared steps up to that of `first`, the last one last.
        ranks: of the run on many.
    """
    step = steps[-1]
    match first.phase:
        case "batches":
            return ScriptCause("same samples", SAME_SAMPLES)
        case "start":
            return _start(first)
        case "forward":
            return _forward(first, step)
        case "loss":
            return _loss(first, found, steps, ranks)
        case "backward":
            return _backward(first, found, steps, ranks)
        case "update":
            return _update(first, found, steps)
        case "files":
            return ScriptCause(
                "file",
                f"all steps are right, and {first.parameter}, which the script wrote, is not: it "
                "holds a part of the model, or other weights.",
            )
        case "buffers":
            return _buffer(first, step)


def _buffer(first: ScriptDifference, step: StepComparison) -> ScriptCause:
    if step.depends_on_rows(first.parameter or ""):
        return ScriptCause(
            "buffer",
            f"the buffer {first.parameter} holds what one rank has seen: it is updated from the "
            "samples that a rank computes at once.",
        )
    return ScriptCause(
        "wrong buffer",
        f"the buffer {first.parameter} differs from that of one process, and is the same on all "
        "ranks: it was not updated, or by something else than this step's samples.",
    )


def _start(first: ScriptDifference) -> ScriptCause:
    return ScriptCause(
        "ranks apart",
        f"{first.parameter} differs between the ranks before the first step: each has drawn "
        "weights of its own, and nothing has sent one rank's to the others.",
    )


def _forward(first: ScriptDifference, step: StepComparison) -> ScriptCause:
    kinds = {call.module: call.kind for call in step.calls}
    kind = kinds.get(first.module or "", "")
    name = first.module or "the model"
    if kind.startswith("BatchNorm"):
        return ScriptCause(
            "batch statistics",
            f"{name} is a {kind}: it normalises over the samples that one rank computes at once. "
            "sync_batchnorm=True, or SyncBatchNorm, takes those of all ranks.",
        )
    if kind in DROPOUTS:
        return ScriptCause(
            "random numbers", f"{name} is a {kind}, and the ranks draw other masks than one device."
        )
    return ScriptCause(
        "wrong output",
        f"{name} ({kind}) returns other values, and all modules that ended before it are right: "
        "look at its forward pass, at its weights, and at what is computed between it and them.",
    )


def _loss(
    first: ScriptDifference,
    found: list[ScriptDifference],
    steps: list[StepComparison],
    ranks: int,
) -> ScriptCause:
    if any(difference.phase == "backward" for difference in found):
        return _backward(first, found, steps, ranks)
    return ScriptCause(
        "loss",
        "the outputs of all modules and all gradients are right, and the loss that is reported is "
        "not: it is computed or averaged over ranks in another way.",
    )


def _without_gradient(step: StepComparison, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters that one process has a gradient of, and the ranks have none."""
    expected, given = step.expected.below("gradient"), step.given.below("gradient")
    return tuple(
        name for name in names if name in expected and (name not in given or not given[name].any())
    )


def _of_parameters(
    wrong: tuple[str, ...], steps: list[StepComparison], known: dict[str, GradientRatio]
) -> ScriptCause | None:
    """Return the cause that some wrong parameters show by themselves; None if none does."""
    step = steps[-1]
    unknown = tuple(name for name in wrong if name not in step.index.gradients)
    if unknown and step.index.gradients:
        return ScriptCause(
            "not updated",
            f"the optimizer does not hold {_listed(unknown)}, as it does on one process.",
            parameters=unknown,
        )
    if kept := tuple(name for name in wrong if _is_earlier(steps, name)):
        return _not_zeroed(kept)
    if missing := _without_gradient(step, wrong):
        return _missing(missing)
    if apart := tuple(name for name in wrong if name in step.apart()):
        return _not_reduced(apart, wrong, known)
    return None


def _backward(
    first: ScriptDifference,
    found: list[ScriptDifference],
    steps: list[StepComparison],
    ranks: int,
) -> ScriptCause:
    step = steps[-1]
    wrong = tuple(d.parameter for d in found if d.phase == "backward" and d.parameter)
    known = ratios(step.expected.below("gradient"), step.given.below("gradient"))
    if cause := _of_parameters(wrong, steps, known):
        return cause
    factor = common_factor(known, step.direction)
    if factor is not None and len(wrong) > 1:
        return _scale(factor, ranks)
    if _holds_earlier(steps, wrong):
        return _not_zeroed(wrong)
    weights = _weights_of_rows(step)
    if weights is not None:
        return weights
    return _wrong_module(first, wrong, known, step, ranks)


def _not_zeroed(names: tuple[str, ...]) -> ScriptCause:
    return ScriptCause(
        "not zeroed",
        f"the gradients of {_listed(names)} hold those of earlier steps: nothing has set them to "
        "zero in between.",
        parameters=names,
    )


def _missing(names: tuple[str, ...]) -> ScriptCause:
    return ScriptCause(
        "missing gradient",
        f"{_listed(names)} {'has' if len(names) == 1 else 'have'} no gradient, or zeros, on many "
        "ranks, and one on one process.",
        parameters=names,
    )


def _not_reduced(
    apart: tuple[str, ...], wrong: tuple[str, ...], known: dict[str, GradientRatio]
) -> ScriptCause:
    which = "all parameters" if len(apart) >= len(known) else _listed(apart)
    return ScriptCause(
        "missing reduction",
        f"the gradients of {which} differ between the ranks when the optimizer steps: each rank "
        "steps with those of its own samples, so its weights drift away from the others'.",
        parameters=apart if len(apart) < len(known) else (),
    )


def _scale(factor: float, ranks: int) -> ScriptCause:
    times = in_words(factor, ranks)
    where = "divided once too often" if factor < 1 else "not divided, or added up once too often"
    return ScriptCause(
        "scale",
        f"all gradients are {times} times those of one process: they have been {where} (by the "
        "number of ranks or of micro-batches), or clipped by another norm.",
        factor,
    )


def _weights_of_rows(step: StepComparison) -> ScriptCause | None:
    """Return the cause where rows of the last output have other weights in the loss."""
    pair, tolerance = step.last_output_gradient(), step.direction(ROWS)
    if pair is None:
        return None
    factors = row_factors(*pair, tolerance)
    if factors is None and pair[0].dim() > 1:  # rows of tokens, say
        factors = row_factors(pair[0].flatten(0, -2), pair[1].flatten(0, -2), tolerance)
    if not factors:
        return None
    low, high = min(factors), max(factors)
    if math.isfinite(high) and high - low <= tolerance * max(abs(high), 1e-12):
        return None
    return ScriptCause(
        "weights of samples",
        "samples count otherwise in the loss than on one device: the gradient of the output "
        f"is {low / high:.3g} times as large for some samples as for others. A mean over each "
        "rank's own count (tokens, boxes, samples) is averaged over the ranks; divide by the "
        "count of all ranks.",
    )


def _wrong_module(
    first: ScriptDifference,
    wrong: tuple[str, ...],
    known: dict[str, GradientRatio],
    step: StepComparison,
    ranks: int,
) -> ScriptCause:
    group = {name: known[name] for name in wrong if name in known}
    factor = common_factor(group, step.direction)
    if len(wrong) < len(known) and factor is not None:
        return ScriptCause(
            "scale",
            f"the {'gradient' if len(wrong) == 1 else 'gradients'} of {_listed(wrong)} "
            f"{'is' if len(wrong) == 1 else 'are'} {in_words(factor, ranks)} times that of one "
            "process, and all others are right: it is added up or averaged over another number "
            "of ranks than the others.",
            factor,
            wrong,
        )
    module = first.module if first.module is not None else (wrong[0].rpartition(".")[0])
    return ScriptCause(
        "wrong gradient",
        f"the backward pass is right after {module or 'the model'} and wrong from there on: look "
        "at the gradients that it, or what stands between it and the layer after it, computes or "
        "reduces.",
        parameters=wrong if len(wrong) < len(known) else (),
    )


def _is_earlier(steps: list[StepComparison], name: str) -> bool:
    """Return True for a gradient of an earlier step where one process has none."""
    step, key = steps[-1], f"gradient/{name}"
    if key in step.expected or key not in step.given or not step.given[key].any():
        return False
    return any(key in s.given and s.given[key].equal(step.given[key]) for s in steps[:-1])


def _holds_earlier(steps: list[StepComparison], wrong: tuple[str, ...]) -> bool:
    given = {
        name: tensor for name, tensor in steps[-1].given.below("gradient").items() if name in wrong
    }
    parts = [step.expected.below("gradient") for step in steps]
    return len(steps) > 1 and any(
        is_sum_of(given, parts[start:], steps[-1].direction) for start in range(len(parts) - 1)
    )


def _update(
    first: ScriptDifference, found: list[ScriptDifference], steps: list[StepComparison]
) -> ScriptCause:
    step = steps[-1]
    wrong = tuple(d.parameter for d in found if d.phase == "update" and d.parameter)
    if step.reference.settings != step.index.settings:
        return ScriptCause(
            "update",
            f"the optimizer's settings differ: {_settings(step)}.",
            parameters=wrong,
        )
    if len(steps) > 1:
        before, after = steps[-2].given.below("weight"), step.given.below("weight")
        still = tuple(n for n in wrong if n in before and before[n].equal(after[n]))
        if still:
            return ScriptCause(
                "not updated",
                f"the step does not change {_listed(still)}: the optimizer holds other parameters.",
                parameters=still,
            )
    apart = "" if math.isfinite(first.error) else " It is missing, or has another shape."
    return ScriptCause(
        "update",
        f"all gradients are right, and {_listed(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong "
        f"after the step: look at the optimizer's state and groups, at clipping, and at writes "
        f"into weights.{apart}",
        parameters=wrong,
    )


def _settings(step: StepComparison) -> str:
    for number, (one, many) in enumerate(
        zip(step.reference.settings, step.index.settings, strict=False)
    ):
        for name in one:
            if one[name] != many.get(name):
                return f"{name} of group {number} is {many.get(name)}, and {one[name]} on one"
    return "the number of groups"


def _listed(names: tuple[str, ...]) -> str:
    """Return names as words: "a", "a and b", "a, b and 3 more"."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
