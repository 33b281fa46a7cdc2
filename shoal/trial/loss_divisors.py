"""Divisors of a loss: the samples, or what a rank has counted among its own.

    F.cross_entropy(scores, tokens)         divides by the tokens that are not ignored
    (losses * mask).sum() / mask.sum()      divides by what the mask leaves
    F.mse_loss(output, target)              divides by the elements, so many for each sample
    losses.mean() * len(x) / batch_size     is a rank's share of the loss
    real - k * fake                         multiplies by k, which a rank may have of its own losses
    (loss - b).abs() + b                    multiplies by -1 where a rank's loss is below b
    x.mean(0).clamp(min=b).sum()            multiplies by 0 where a rank's mean is below b
    cross_entropy(..., weight=1 / counts)   multiplies by weights that a rank may have counted

Where ranks divide by different counts, the mean of their losses is not the loss of the whole batch.
The graph of a loss knows its divisors, so a loss that is there already can be looked at too. What
it does not know: whether a sample's loss depends on other samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.row_collectives import is_of_all_ranks
from shoal.platform.autograd_graph import nodes_behind
from shoal.platform.torch_private.tensor_state import saved_value
from shoal.strategies.loss_terms import Counted

MOST_NODES = 2_000
"""Nodes of a graph that are looked at."""
MOST_TERMS = 64
_NONE = 1e-300
"""Stands for a factor of 0, by which nothing can be divided."""
MEAN, SUM = 1, 2
"""Values of `reduction` of torch's losses, in their nodes."""
POINTWISE = {
    *("Abs", "Add", "Alias", "Cat", "Clamp", "ClampMin", "Clone", "Div", "Exp", "Expand", "Index"),
    *("Log", "MaskedFill", "MaskedSelect", "Mean", "Mul", "Neg", "Permute", "Pow", "Reshape"),
    *("ReshapeAlias", "Select", "Slice", "Squeeze", "Stack", "Sub", "T", "ToCopy"),
    *("Transpose", "UnsafeView", "Unsqueeze", "View", "Where"),
}
"""Nodes behind which a divisor may stand; a path ends at any other."""
SUMS = {"Sum", "Nansum", "Dot"}
"""Nodes that add up samples."""
PRODUCTS = {"Mv", "Mm", "Bmm", "Addmm", "Addmv", "Baddbmm"}
"""Nodes that add up what may be samples, and divide by nothing."""
BENDS = {"Abs", "Clamp", "ClampMin", "Hardtanh", "Maximum", "Minimum", "Relu", "Where"}
"""Nodes that multiply a gradient by the slope at their input."""
CHOICES = {"Topk", "Sort", "Kthvalue", "Median", "Max", "Min"}
"""Nodes that choose among numbers along a dimension. The largest of all numbers of a matrix is left
alone: a softmax is shifted by it.
"""

WORDS = {
    **{"NllLoss": "cross_entropy", "NllLoss2D": "cross_entropy", "Mean": "mean", "Sum": "sum"},
    "BinaryCrossEntropy": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
}
"""Operations of nodes, as a script writes them."""

COUNTED = (
    "run.backward was given a loss that divides by what each rank has counted among its own "
    "samples ({operation}): {counts}. One device divides by the count of the whole batch. Return "
    'sum and count: run.backward(shoal.counted(F.cross_entropy(..., reduction="sum"), (y != '
    "-100).sum())), or run.backward(shoal.counted((losses * mask).sum(), mask.sum())); of a mean "
    "that a model returns, mean * count and count. Or, to train the mean of the ranks' means, say "
    'so: run.backward(loss, reduction="ranks").'
)
MULTIPLIED = (
    "run.backward was given a loss in which each rank multiplies a term ({operation}) by another "
    "number: {counts}. One device has one. Compute it from what all ranks have, such as the loss "
    "that run.backward returns or run.gather(tensor); draw it by a torch.Generator of its own. "
    "Where abs, clamp or maximum bends a mean, the number is its slope: bend that of all samples, "
    "run.gather(losses).mean(). Or, "
    'to train the mean of the ranks\' means, say so: run.backward(loss, reduction="ranks").'
)
SUMMED = (
    "run.backward was given a sum over samples ({operation}), and takes their mean: n ranks would "
    "each take their sum for a mean. Divide it by the number of this rank's samples: "
    "loss / len(x). Where it is divided by a count already, return both: "
    "run.backward(shoal.counted(sum, count))."
)
WEIGHTED = (
    "run.backward was given a mean ({operation}) that is multiplied by the samples of this rank "
    "and divided by those of all, {samples}. It takes the mean over this rank's samples, and "
    "weights the ranks by theirs: run.backward(loss) without the two numbers."
)
UNSEEN = (
    "note: run.backward does not see whether this loss is the mean over the samples of all ranks: "
    "{reason}. shoal verify tells."
)
DIVIDED = (
    "note: the loss is divided by {parts}, as many as the micro-batches of a step. "
    "run.microbatches weights each by its samples already: where the division is for that, leave "
    "it out."
)


class Divisor(NamedTuple):
    """A way from a loss to the output of a model.

    Attributes:
        operation: the reduction at its beginning; "" before one.
        value: product of all that it is divided by.
        adds: it adds up samples.
        divides: it divides by something that is as large as their number.
        factor: product of the single numbers that the reduction is multiplied by.
        multiplies: there is such a number, which may be 1.
        elements: numbers that the reduction adds up; 0 where it takes a mean.
        outer: product of the numbers that the reduction is divided by.
        is_seen: False for an operation that may divide inside.
    """

    operation: str = ""
    value: float = 1.0
    adds: bool = False
    divides: bool = False
    factor: float = 1.0
    multiplies: bool = False
    elements: int = 0
    outer: float = 1.0
    is_seen: bool = True

    @property
    def is_sum(self) -> bool:
        """True for a sum over samples."""
        return self.adds and not self.divides


def divisors_of(loss: Tensor | Counted, rows: int, outputs: Collection[Any]) -> list[Divisor]:
    """Return what a loss divides by, on each way to the models. A counted sum is left out.

    Args:
        rows: samples in it.
        outputs: `grad_fn` of what the models have returned; none of a model that computes its loss
            by its own parameters.

    Raises: RuntimeError: the graph was used and freed.
    """
    means = [loss] if isinstance(loss, Tensor) else [t.value for t in loss.terms if t.count is None]
    found: list[Divisor] = []
    paths = [(mean.grad_fn, Divisor()) for mean in means]
    for _ in range(MOST_NODES):
        if not paths or len(found) == MOST_TERMS:
            break
        node, way = paths.pop()
        if _leads_on(node, outputs):
            paths += _next(node, way, rows)
        elif not is_of_all_ranks(node):
            used = islice(nodes_behind([node], is_of_all_ranks), MOST_NODES)
            # Without outputs, all that weights are multiplied with counts: a penalty has only them.
            is_product = not outputs and _kind(node) != "AccumulateGrad"
            of_models = is_product or any(node in outputs for node in used)
            if not way.operation and of_models and node not in outputs:
                way = way._replace(operation=_kind(node), is_seen=_kind(node) in PRODUCTS)
            if saved_value(node, "reduce") == "mean":  # scatter_reduce: of each group of samples
                way = way._replace(operation=_kind(node), is_seen=False)
            if way.operation:
                found.append(way if of_models else way._replace(adds=False, elements=0))
    return found


def _leads_on(node: Any, outputs: Collection[Any]) -> bool:
    """Return True if a divisor may stand behind a node."""
    if node in outputs or is_of_all_ranks(node):
        return False
    if _kind(node) in BENDS - POINTWISE:
        bent = _bent(node)
        return bent is not None and not bent.dim()
    return _kind(node) in POINTWISE | SUMS or saved_value(node, "reduction") is not None


def chooses_rows(node: Any, samples: int) -> bool:
    """Return True for a node that takes the largest, or smallest, of numbers along the samples."""
    if _kind(node) not in CHOICES or samples < 2:
        return False
    sizes = saved_value(node, "self_sym_sizes")
    if sizes is None:  # of all numbers, one for each sample: losses.max()
        given = saved_value(node, "self")
        return isinstance(given, Tensor) and given.shape == (samples,)
    if not sizes:
        return False
    dim = _signed(saved_value(node, "dim")) % len(sizes)
    return dim == 0 and (sizes[0] == samples or (len(sizes) == 1 and sizes[0] % samples == 0))


def _next(node: Any, way: Divisor, rows: int) -> list[tuple[Any, Divisor]]:
    """Return the ways behind a node that has one or several inputs, each with its next node."""
    name, reduction = _kind(node), saved_value(node, "reduction")
    adds = name in SUMS or reduction == SUM
    divisor, begun, of_classes = (
        _divisor(node, name, rows),
        bool(way.operation),
        _class_weights(node),
    )
    if adds or name == "Mean" or reduction == MEAN:
        elements = way.elements if begun or not adds else _elements(node)
        way = way._replace(operation=way.operation or WORDS.get(name, name), elements=elements)
    behind = []
    for index, (other, _) in enumerate(node.next_functions):
        if other is None:
            continue
        here = divisor if name != "Div" or index == 0 else 1.0
        number = 1.0  # also for several numbers
        if name == "Mul":
            number = _number(saved_value(node, "other" if index == 0 else "self"))
        factor = number or 1.0
        # Behind a reduction over samples, a number may belong to one of them.
        own = (1.0 if begun else factor) * _slope(node, index, rows, begun) * of_classes
        after = way._replace(
            value=way.value * here,
            adds=way.adds or adds,
            # A sum times 0 may be of samples too.
            divides=way.divides or not number or _divides_samples(node, index, here, factor, rows),
            factor=way.factor * own,
            multiplies=way.multiplies or (name == "Mul" and not begun),
            outer=way.outer if way.operation else way.outer * here,
        )
        behind.append((other, after))
    return behind


def _divisor(node: Any, name: str, rows: int) -> float:
    """Return what a node divides by: 1 if by nothing, or by numbers of samples; a mean of others,
    such as counts of classes.
    """
    if (reduction := saved_value(node, "reduction")) is not None:
        if reduction != MEAN:
            return 1.0
        weight = saved_value(node, "total_weight")  # of targets that are not ignored
        return float(saved_value(node, "self").numel() if weight is None else weight)
    if name == "Mean":
        sizes = saved_value(node, "self_sym_sizes")
        return float(math.prod(sizes[dim] for dim in _reduced_dims(node, sizes)))
    if name == "Div":
        other = saved_value(node, "other")
        is_of_classes = isinstance(other, Tensor) and 1 < other.numel() < rows
        return (_in_one_number(other) or 1.0) if is_of_classes else _number(other)
    return 1.0


def _divides_samples(node: Any, index: int, here: float, factor: float, rows: int) -> bool:
    """Return True for a node that divides by the samples, or by something as large.

    A weight of the loss is no divisor, but 1 / len(x) is.

    Args: here, factor: what it divides by, and what it multiplies by.
    """
    name = _kind(node)
    if name == "Mean":
        sizes = saved_value(node, "self_sym_sizes")
        dims = _reduced_dims(node, sizes)
        if sizes and 0 not in dims:  # numbers of one sample, unless time comes first
            is_time_first = any(sizes[dim] == rows for dim in dims) or sizes[0] % rows
            return sizes[0] != rows and bool(is_time_first)
        return bool(sizes) and here >= rows
    if saved_value(node, "reduction") == MEAN or (name == "Div" and index == 0):
        return rows == 1 or abs(here) >= rows
    return factor != 1.0 and 1 / abs(factor) >= rows


def _class_weights(node: Any) -> float:
    """Return a mean of the weights of classes that a loss of torch's has; 1 without any, and for
    weights of samples.
    """
    factor, given = 1.0, saved_value(node, "self")
    for name in ("weight", "pos_weight"):
        weights = saved_value(node, name)
        if not isinstance(weights, Tensor) or not isinstance(given, Tensor):
            continue
        is_of_all_samples = weights.dim() < given.dim()
        if name == "pos_weight":
            is_of_all_samples |= weights.shape[:1] == (1,)
        if is_of_all_samples or _kind(node).startswith("Nll"):
            factor *= _in_one_number(weights)
    return factor or 1.0


def _in_one_number(values: Tensor) -> float:
    """Return a mean of values in which each has a weight of its own, so that their order counts."""
    values = values.detach().double().flatten()
    weights = 2 + torch.arange(len(values), device=values.device).double().cos()
    return float((values * weights).sum() / weights.sum())


def _elements(node: Any) -> int:
    """Return how many numbers a sum adds up."""
    if (sizes := saved_value(node, "self_sym_sizes")) is not None:
        return math.prod(sizes)
    target = saved_value(node, "target" if _kind(node).startswith("Nll") else "self")
    return target.numel() if isinstance(target, Tensor) else 0


def _signed(dim: int) -> int:
    """Return a dimension, of which nodes keep a negative one as an unsigned number."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _bent(node: Any) -> Tensor | None:
    """Return what a node has saved of its input, its output or its choice; a number before more."""
    saved = (saved_value(node, name) for name in ("self", "result", "condition"))
    return min((v for v in saved if isinstance(v, Tensor)), key=Tensor.dim, default=None)


def _slope(node: Any, index: int, rows: int, begun: bool) -> float:
    """Return the derivative of a bend by an input that is a number, or a mean of its derivatives by
    means over samples; 1 for another node.

    Args: begun: behind a reduction, where a number may belong to one sample.
    """
    bent = _bent(node) if _kind(node) in BENDS else None
    if bent is None:
        return 1.0
    if not _is_over_samples(node.next_functions[index][0], rows) if bent.dim() else begun:
        return 1.0
    slopes = node(torch.ones(bent.shape, dtype=torch.float64, device=bent.device))
    return _in_one_number(slopes if isinstance(slopes, Tensor) else slopes[index])


def _is_over_samples(node: Any, rows: int) -> bool:
    """Return True for a node of means, or sums, over samples."""
    is_reduction = node is not None and _kind(node) in ("Mean", "Sum")
    return is_reduction and bool(saved_value(node, "dim")) and _reduces_samples(node, rows)


def _reduces_samples(node: Any, rows: int) -> bool:
    """Return True for a sum or mean of numbers of which each sample has as many."""
    sizes: Sequence[int] = saved_value(node, "self_sym_sizes") or ()
    return bool(sizes) and sizes[0] == rows and 0 in _reduced_dims(node, sizes)


def _reduced_dims(node: Any, sizes: Sequence[int]) -> set[int]:
    """Return the dimensions over which a node takes a sum or a mean; all, where it names none."""
    return {_signed(dim) % len(sizes) for dim in saved_value(node, "dim") or range(len(sizes))}


def _is_mean(node: Any, samples: int) -> bool:
    """Return True for a mean of numbers of which each sample has as many."""
    if saved_value(node, "reduction") != MEAN:
        return _kind(node) == "Mean" and _reduces_samples(node, samples)
    given = saved_value(node, "self")
    return isinstance(given, Tensor) and given.shape[:1] == (samples,)


def is_mean_over(samples: int, number: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Return True for a mean over samples of what models have returned."""
    if number.dim() or samples < 2:
        return False
    makers = {output.grad_fn for output in outputs}
    nodes = islice(nodes_behind([number.grad_fn], makers.__contains__), MOST_NODES)
    return any(_is_mean(node, samples) for node in nodes)


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        is_real = value.dim() == 0 and not value.is_complex()
        return float(value.detach()) if is_real else 1.0
    return float(value) if isinstance(value, int | float) else 1.0


def _kind(node: Any) -> str:
    """Return a node's operation: "Mean" for MeanBackward0."""
    name: str = node.name()
    return name.removeprefix("torch::autograd::").split("Backward")[0]


class LossPart(NamedTuple):
    """A loss of some samples.

    Attributes: place: "rank 1", or "rank 1, micro-batch 0".
    """

    place: str
    rows: int
    divisors: list[Divisor]


def objection(parts: Sequence[LossPart]) -> str:
    """Return what is wrong with the losses of parts of a global batch; "" if nothing is seen."""
    parts = [part for part in parts if part.rows]
    if len({tuple(one.operation for one in part.divisors) for part in parts}) != 1:
        return ""  # they have different terms: see `doubt`
    terms = zip(*(part.divisors for part in parts), strict=True)
    return next(filter(None, (_objection_to(term, parts) for term in terms)), "")


def doubt(parts: Sequence[LossPart]) -> str:
    """Return why it cannot be seen that the losses of parts are right; "" if nothing tells."""
    parts = [part for part in parts if part.rows]
    if unseen := [one.operation for part in parts for one in part.divisors if not one.is_seen]:
        return f"it does not look into {unseen[0]}"
    terms = [len(part.divisors) for part in parts]
    kinds = {tuple(one.operation for one in part.divisors) for part in parts}
    if len({*map(len, kinds)}) < len(kinds):  # as many, but others
        words = (dict.fromkeys(one.operation for one in part.divisors) for part in parts)
        told = ", ".join(
            f"{part.place} {'+'.join(w)}" for part, w in zip(parts, words, strict=True)
        )
        return f"ranks add up other terms, {told}"
    if not terms or _are_equal([n / part.rows for n, part in zip(terms, parts, strict=True)]):
        return ""  # perhaps one term for each sample
    told = ", ".join(f"{part.place} of {n}" for n, part in zip(terms, parts, strict=True))
    return f"ranks add up other terms, {told}" if len(kinds) > 1 else ""


def _objection_to(term: Sequence[Divisor], parts: Sequence[LossPart]) -> str:
    """Return what is wrong with one term of a loss. Args: term: of each part."""
    operation = term[0].operation
    values = [divisor.value for divisor in term]
    rows = [part.rows for part in parts]
    is_sum = all(divisor.is_sum for divisor in term) and _fit(values, rows)
    if is_sum or _is_share_of_sum(term, parts):
        return SUMMED.format(operation=operation)
    if len(parts) > 1 and _is_weighted_by_samples(term, rows):
        return WEIGHTED.format(operation=operation, samples=sum(rows))
    words, numbers = COUNTED, values
    if _fit(values, rows):
        words, numbers = MULTIPLIED, [divisor.factor for divisor in term]
        # By 0 where a rank's number is beyond the bend.
        scaled = [value / (factor or _NONE) for value, factor in zip(values, numbers, strict=True)]
        # As many terms of a kind as samples may be one for each, with a number of its own.
        of_kind = [sum(each.operation == operation for each in part.divisors) for part in parts]
        if _fit(scaled, rows) or any(
            n >= part.rows for n, part in zip(of_kind, parts, strict=True)
        ):
            return ""
    counts = ", ".join(
        f"{part.place} by {number:.6g} for {part.rows} samples"
        for number, part in zip(numbers, parts, strict=True)
    )
    return words.format(operation=operation, counts=counts)


def _is_weighted_by_samples(term: Sequence[Divisor], rows: Sequence[int]) -> bool:
    """Return True if each mean is weighted by its share of all samples.

    Where all shares are equal, one number may as well be the weight of a term.
    """
    pairs = [*zip(term, rows, strict=True)]
    if all((one.factor, one.outer) == (n, sum(rows)) for one, n in pairs):
        # Of one sample each, it may be divided by the batches of a step alone.
        return any(one.multiplies for one in term)
    shares = [one.factor / one.outer * sum(rows) / n for one, n in pairs]
    return len(set(rows)) > 1 and _are_equal([1, *shares])


def _is_share_of_sum(term: Sequence[Divisor], parts: Sequence[LossPart]) -> bool:
    """Return True if a sum of one part's samples is divided by those of all parts.

    One device has all of them, and so its script may divide by the size of the whole batch. By
    such a number a mean may be divided too, as that of two views is: by all that it adds up.
    """
    samples = sum(part.rows for part in parts)
    if len(parts) == 1 or not all(one.elements and one.value == samples for one in term):
        return False
    shares = [sum(d.elements / (d.value or math.inf) for d in part.divisors) for part in parts]
    return not _are_equal([1, *shares])


def _fit(divisors: Sequence[float], rows: Sequence[int]) -> bool:
    """Return True if parts divide by the same number, or by the same for each sample."""
    of_sample = [divisor / n for divisor, n in zip(divisors, rows, strict=True)]
    return not all(map(math.isfinite, divisors)) or _are_equal(divisors) or _are_equal(of_sample)


def _are_equal(numbers: Sequence[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=1e-5) for number in numbers)
