"""The likely cause of the first difference, from its phase and from ratios of gradients.

all gradients one multiple               a scale: ranks, micro-batches, clipping
gradients differ between ranks           a missing reduction
rows of the outputs weighted otherwise   weights of samples: a mean of means
loss wrong, outputs right, else          samples that the loss takes together
one layer on, all before it wrong        that layer's backward pass
gradients right, weights wrong           the update

g = gradients on one process, h = gradients on many ranks
factor   <h, g> / <g, g>             1/2: they were divided once too often, by 2 ranks
rest     h - factor g                0: h is a multiple of g; else another direction
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor

from shoal.verification.differences import differences
from shoal.verification.script.script_report import Phase, ScriptCause, ScriptDifference
from shoal.verification.script.step_comparison import StepComparison

SAME_SAMPLES = (
    "all ranks compute the same outputs of the same samples and send nothing on the way, so they "
    "take the step that one of them would take alone: give the loader a sampler that knows the "
    "rank, such as DistributedSampler."
)

SAMPLES_TOGETHER = (
    "the outputs of all modules are right, and the loss of them is not, by no weight of samples: a "
    "loss that takes several samples together (pairs, neighbours, statistics of the batch) has "
    "those of one rank alone. Compute it from the samples of all ranks, which have to be gathered."
)


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
    gradients = _names_in("backward", found)
    match first.phase:
        case "batches":
            return ScriptCause("same samples", SAME_SAMPLES)
        case "start":
            return ScriptCause(
                "ranks apart",
                f"{first.parameter} differs between the ranks before the first step: each has "
                "drawn weights of its own, and nothing has sent one rank's to the others.",
            )
        case "forward":
            return _forward(first, step)
        case "loss" if not gradients:
            return ScriptCause(
                "loss",
                "the outputs of all modules and all gradients are right, and the loss that is "
                "reported is not: it is computed or averaged over ranks in another way.",
            )
        case "loss" | "backward":
            cause = _backward(first, gradients, step, ranks)
            is_of_loss = first.phase == "loss" and cause.kind == "wrong gradient"
            return ScriptCause("loss", SAMPLES_TOGETHER) if is_of_loss else cause
        case "update":
            return _update(first, _names_in("update", found), steps)
        case "files":
            return ScriptCause(
                "file",
                f"all steps are right, and {first.parameter}, which the script wrote, is not: it "
                "holds a part of the model, or other weights.",
            )
        case "buffers":
            return _buffer(first, step)


def _names_in(phase: Phase, found: list[ScriptDifference]) -> tuple[str, ...]:
    """Return the names of the parameters that differ in a phase."""
    return tuple(d.parameter for d in found if d.phase == phase and d.parameter)


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
    return ScriptCause(
        "wrong output",
        f"{name} ({kind}) returns other values, and all modules that ended before it are right: "
        "look at its forward pass, at its weights, and at what is computed between it and them.",
    )


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


def _backward(
    first: ScriptDifference, wrong: tuple[str, ...], step: StepComparison, ranks: int
) -> ScriptCause:
    """Return the cause of wrong gradients. Args: wrong: names of their parameters."""
    given = step.given.below("gradient")
    known = {
        name: gradient
        for name, gradient in step.expected.below("gradient").items()
        if name in given and given[name].shape == gradient.shape
    }
    if cause := _of_parameters(wrong, step, len(known)):
        return cause
    are_known = all(name in known for name in wrong)
    factor = common_factor(known, given, step.direction) if are_known else None
    if factor is not None and len(wrong) > 1:
        where = (
            "divided once too often" if factor < 1 else "not divided, or added up once too often"
        )
        return ScriptCause(
            "scale",
            f"all gradients are {in_words(factor, ranks)} times those of one process: they have "
            f"been {where} (by the number of ranks or of micro-batches), or clipped by another "
            "norm.",
            factor,
        )
    if cause := _weights_of_rows(step):
        return cause
    is_part = len(wrong) < len(known)
    if are_known:
        factor = common_factor({name: known[name] for name in wrong}, given, step.direction)
    if is_part and factor is not None:
        return ScriptCause(
            "scale",
            f"the gradients of {_listed(wrong)} are {in_words(factor, ranks)} times those of one "
            "process, and all others are right: they are added up or averaged over another number "
            "of ranks than the others.",
            factor,
            wrong,
        )
    module = first.module if first.module is not None else wrong[0].rpartition(".")[0]
    return ScriptCause(
        "wrong gradient",
        f"the backward pass is right after {module or 'the model'} and wrong from there on: look "
        "at the gradients that it, or what stands between it and the layer after it, computes, "
        "reduces, or keeps of an earlier step.",
        parameters=wrong if is_part else (),
    )


def _of_parameters(
    wrong: tuple[str, ...], step: StepComparison, compared: int
) -> ScriptCause | None:
    """Return the cause that some wrong parameters show by themselves; None if none does.

    Args: compared: parameters that both runs have a gradient of.
    """
    unknown = tuple(name for name in wrong if name not in step.index.gradients)
    if unknown and step.index.gradients:
        return ScriptCause(
            "not updated",
            f"the optimizer does not hold {_listed(unknown)}, as it does on one process.",
            parameters=unknown,
        )
    if missing := tuple(name for name in wrong if _has_none(step, name)):
        return ScriptCause(
            "missing gradient",
            f"many ranks have no gradient, or zeros, of {_listed(missing)}, and one process has "
            "one.",
            parameters=missing,
        )
    apart = tuple(filter(step.apart().__contains__, wrong))
    if not apart:
        return None
    is_all = len(apart) >= compared
    return ScriptCause(
        "missing reduction",
        f"the gradients of {'all parameters' if is_all else _listed(apart)} differ between the "
        "ranks when the optimizer steps: each rank steps with those of its own samples, so its "
        "weights drift away from the others'.",
        parameters=() if is_all else apart,
    )


def _has_none(step: StepComparison, name: str) -> bool:
    """Return True for a parameter of which one process alone has a gradient that is not zero."""
    key = f"gradient/{name}"
    given = step.given.get(key)
    return key in step.expected and (given is None or not given.any())


def _weights_of_rows(step: StepComparison) -> ScriptCause | None:
    """Return the cause where rows of the last output have other weights in the loss."""
    pair, tolerance = step.last_output_gradient(), step.direction
    factors = [] if pair is None else row_factors(*pair, tolerance)
    low, high = min(factors, default=1.0), max(factors, default=1.0)
    if math.isfinite(high) and high - low <= tolerance * max(abs(high), 1e-12):
        return None
    return ScriptCause(
        "weights of samples",
        "samples have other weights in the loss than on one device: the gradient of the output "
        f"is {low / high:.3g} times as large for some samples as for others. A mean over each "
        "rank's own count (tokens, boxes, samples) is averaged over the ranks; divide by the "
        "count of all ranks.",
    )


def _update(
    first: ScriptDifference, wrong: tuple[str, ...], steps: list[StepComparison]
) -> ScriptCause:
    step = steps[-1]
    if step.reference.settings != step.index.settings:
        return ScriptCause(
            "update", f"the optimizer's settings differ: {_settings(step)}.", parameters=wrong
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
    missing = "" if math.isfinite(first.error) else " It is missing, or has another shape."
    return ScriptCause(
        "update",
        f"all gradients are right, and {_listed(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong "
        f"after the step: look at the optimizer's state and groups, at clipping, and at writes "
        f"into weights.{missing}",
        parameters=wrong,
    )


def _settings(step: StepComparison) -> str:
    pairs = zip(step.reference.settings, step.index.settings, strict=False)
    for number, (one, many) in enumerate(pairs):
        for name in one:
            if one[name] != many.get(name):
                return f"{name} of group {number} is {many.get(name)}, and {one[name]} on one"
    return "the number of groups"


def _listed(names: tuple[str, ...]) -> str:
    """Return names as words: "a", "a and b", "a, b and 3 more"."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def common_factor(
    expected: Mapping[str, Tensor], given: Mapping[str, Tensor], tolerance: float
) -> float | None:
    """Return the one factor of all tensors; None where they have several, or no multiple.

    Args:
        expected, given: tensors of the same names and shapes.
        tolerance: how far a tensor may lie from the multiple, relative to its largest entry.
    """
    square = sum(float(g.double().square().sum()) for g in expected.values())
    if not square:
        return None
    factor = sum(float((g.double() * given[n]).sum()) for n, g in expected.items()) / square
    multiples = {name: factor * g for name, g in expected.items()}
    worst = max(differences(multiples, given).values())
    return factor if worst <= tolerance else None


def row_factors(expected: Tensor, given: Tensor, tolerance: float) -> list[float]:
    """Return a factor for each row, or token, of a gradient of outputs; none if one is no multiple.

    Rows without any gradient are left out; those that have one on many ranks alone have an infinite
    factor.
    """
    if not expected.numel() or expected.shape != given.shape:
        return []
    width = expected.shape[-1] if expected.dim() > 1 else 1
    g, h = (tensor.double().reshape(-1, width) for tensor in (expected, given))
    factors = (g * h).sum(1) / g.square().sum(1)
    rests = (h - factors[:, None] * g).norm(dim=1) / h.norm(dim=1)
    if bool((rests > tolerance).any()):
        return []
    is_added = h.any(1) & ~g.any(1)
    factors = factors.masked_fill(is_added, math.inf)
    return [float(factor) for factor in factors[g.any(1) | is_added]]


def in_words(factor: float, ranks: int) -> str:
    """Return a factor as people write it: "2", "1/2 (there are 2 ranks)", "0.7071"."""
    fraction = Fraction(factor).limit_denominator(16)
    if not fraction or abs(fraction - factor) > 1e-6 * max(1.0, abs(factor)):
        return f"{factor:.4g}"
    powers = (ranks, ranks**2)
    is_of_ranks = any(fraction in (power, Fraction(1, power)) for power in powers)
    return f"{fraction} (there are {ranks} ranks)" if is_of_ranks else f"{fraction}"
