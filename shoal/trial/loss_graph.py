"""A look at the graph of a loss that the loop has computed: is it a mean over samples?

What it divides by, and whether samples influence one another, is told by ranks and micro-batches to
one another in some steps.

    L = (f(a) + f(b) + ...) / n          a mean: the gradient of a does not change with b
    L = log(exp(a) + exp(b) + ...)       a coupled loss: it does

So second derivatives of L across samples tell, by the outputs of the models. Derivatives of the
models are not taken. A loss that is linear in the outputs has none, and is not told; but for a
choice among samples, such as the hardest ones, which nodes of the graph tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.row_collectives import is_of_all_ranks
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.platform.autograd_graph import nodes_behind
from shoal.strategies.loss_terms import LOSS_AS_FUNCTION, Counted
from shoal.trial.loss_divisors import (
    DIVIDED,
    UNSEEN,
    Divisor,
    LossPart,
    chooses_rows,
    divisors_of,
    doubt,
    is_mean_over,
    objection,
)
from shoal.trial.untouched import without_hooks

MOST_NODES = 10_000
"""Nodes of a graph that are looked at."""
MOST_NUMBERS = 1 << 24
"""Numbers of outputs above which nothing is looked at, for their derivatives take memory."""
SMALLEST = 1e-6
"""Share of the largest second derivative above which one across samples is no rounding."""


def couples_samples(
    loss: Tensor, outputs: Sequence[Tensor], samples: int, has_whole_models: bool = True
) -> bool:
    """Return True if the gradient of a sample's output changes with the outputs of others.

    Args:
        outputs: what models have returned. Those count that the loss takes itself, with a row for
            each sample, or several for views of it.
        samples: of the batch.
        has_whole_models: False: outputs of which others were computed are left out, for between
            them lie weights that this rank has not.
    """
    if samples < 2:
        return False
    outputs = [t for t in outputs if _is_looked_at(t, samples)]
    if sum(t.numel() for t in outputs) > MOST_NUMBERS:
        return False
    makers: set[Any] = {t.grad_fn for t in outputs}
    of_loss = {*islice(nodes_behind([loss.grad_fn], makers.__contains__), MOST_NODES)}
    if len(of_loss) == MOST_NODES or any(map(is_of_all_ranks, of_loss)):
        return False
    nodes: list[Any] = [t.grad_fn for t in outputs]
    inputs = [other for node in nodes for other, _ in node.next_functions]
    of_models: set[Any] = set() if has_whole_models else {*islice(nodes_behind(inputs), MOST_NODES)}
    outputs = [t for t in outputs if t.grad_fn in of_loss and t.grad_fn not in of_models]
    try:
        chooses = any(chooses_rows(node, samples) for node in of_loss)
        return bool(outputs) and (chooses or _changes_across(loss, outputs, samples))
    except RuntimeError:
        return False  # without a second derivative, or the graph was freed


def takes_pairs(loss: Tensor | Counted, pairs: Tensor) -> bool:
    """Return True if a loss takes numbers that are of two samples each.

    Args: pairs: (samples, samples, ...), of one sample on the diagonal.
    """
    values = [loss] if isinstance(loss, Tensor) else [term.value for term in loss.terms]
    if not pairs.requires_grad:
        return False
    with suppress(RuntimeError), without_hooks([pairs]):  # of no graph, or of one that was freed
        (gradient,) = torch.autograd.grad(values, pairs, retain_graph=True, allow_unused=True)
        if gradient is not None:
            of_two = ~torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)
            return bool(gradient[of_two].any())
    return False


def _is_looked_at(output: Tensor, samples: int) -> bool:
    """Return True for plain rows; not for those that would add a gradient of now to `.grad`."""
    is_plain = type(output) is Tensor and output.dim() > 0 and len(output) > 0
    return is_plain and len(output) % samples == 0 and not output.retains_grad


def _changes_across(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> bool:
    """Return True if gradients of the first half of the samples change with the others.

    Views of a sample may lie apart, as `torch.cat` puts them, or side by side. Where time comes
    first, samples are dimension 1.
    """
    with torch.enable_grad(), without_hooks(outputs), _without_models(outputs):
        first = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
        for order in ("apart", "side by side", "time first"):
            halves = [_first_half(output, samples, order) for output in outputs]
            if not _is_across(first, outputs, halves):
                return False
    return True


def _first_half(output: Tensor, samples: int, order: str) -> tuple[int, Tensor]:
    """Return the dimension of an output's samples, and for each index whether it is of the first
    half of the samples.
    """
    has_time_first = output.dim() > 2 and output.shape[1] == samples != len(output)
    if order == "time first" and has_time_first:
        return 1, torch.arange(samples, device=output.device) < samples // 2
    rows = torch.arange(len(output), device=output.device)
    views = len(output) // samples
    sample = rows // views if order == "side by side" else rows % samples
    return 0, sample < samples // 2


@contextmanager
def _without_models(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Pass no gradient on behind outputs, of which one may be computed from another one."""

    def zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    makers: set[Any] = {output.grad_fn for output in outputs}
    handles = [maker.register_prehook(zeros) for maker in makers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_across(
    first: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    halves: Sequence[tuple[int, Tensor]],
) -> bool:
    """Return True if first derivatives of some rows have derivatives by others."""
    total = torch.zeros((), device=outputs[0].device)
    for gradient, (dim, mask) in zip(first, halves, strict=True):
        if gradient is not None and gradient.requires_grad:
            rows = gradient.movedim(dim, 0)[mask]
            direction = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device).cos()
            total = total + (rows * direction.view_as(rows)).sum()
    if not total.requires_grad:
        return False
    second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    largest, across = 0.0, 0.0
    for one, (dim, mask) in zip(second, halves, strict=True):
        if one is not None:
            largest = max(largest, float(one.abs().max()))
            across = max(across, float(one.movedim(dim, 0)[~mask].abs().max()))
    return across > SMALLEST * largest


MOST_OUTPUTS = 8
"""Outputs that are held until the loss comes, with the graphs that have made them."""
COUPLED = (
    "run.backward was given a loss in which samples influence one another ({place}): the gradient "
    "of a sample's output changes with the outputs of others, or is 0 where others were chosen "
    "(topk, sort, max over samples). One device takes those of all ranks "
    "together, and so does a loss of rows that run.gather(output) has returned. Where models are "
    "called on chunks that cut across samples, give the loss as a function, which is tried on "
    f"samples: {LOSS_AS_FUNCTION}. Or, to train the mean of the ranks' means, say so: "
    'run.backward(loss, reduction="ranks").'
)
AVERAGED = (
    "run.backward was given a loss that computes with gradients, by autograd.grad, of a mean over "
    "samples ({place}): each is divided by this rank's samples, where one device divides by those "
    "of all ranks. Take the gradients of a sum: torch.autograd.grad(scores.sum(), inputs, "
    "create_graph=True)."
)
APART = (
    "run.backward was given a loss that each rank has computed from the rows of all ranks, and it "
    "is not the same: {losses}. One device has one loss. What it computes with beside these rows, "
    "such as weights of classes or a level, each rank has of its own samples: compute it from "
    "run.gather(tensor)."
)


UNPREPARED = (
    "note: the loss depends on a tensor of shape {shape} that requires a gradient and is a "
    "parameter of no prepared model. Its gradient is that of this rank's samples alone, "
    "where one device takes all. Make it a parameter of a module, and give that and the optimizer "
    "that steps it to run.prepare."
)


LENGTHS = (
    "note: models return other lengths on other ranks from inputs of one length, as "
    "pad_packed_sequence does: {own} on rank 0, {other} on rank {rank}. Where attention or a mean "
    "takes padding in, one device has the length of all samples: "
    "pad_packed_sequence(..., total_length=len(padded)) is the same on all ranks."
)


def lengths_of(tensors: Sequence[Tensor], samples: int) -> list[list[int]]:
    """Return the sizes of tensors in which samples lie along one of the first dimensions, without
    that.
    """
    return [
        [size for dim, size in enumerate(t.shape) if dim != list(t.shape).index(samples)]
        for t in tensors
        if t.dim() > 1 and samples in t.shape[:2]
    ]


def unprepared_leaf(
    loss: Tensor, outputs: Sequence[Tensor], samples: int, prepared: Container[int]
) -> Tensor | None:
    """Return a tensor that a loss depends on besides the outputs of models, and that a script may
    step for all samples; None without one.

    Args:
        samples: tensors with a row for each of them are left out.
        prepared: ids of the parameters of prepared models.
    """
    makers: set[Any] = {t.grad_fn for t in outputs}
    for node in islice(nodes_behind([loss.grad_fn], makers.__contains__), MOST_NODES):
        leaf = getattr(node, "variable", None)
        if leaf is None or id(leaf) in prepared or isinstance(leaf, DTensor):
            continue
        if isinstance(leaf, nn.Parameter) and not outputs:  # of a unit that was gathered
            continue
        if not (leaf.dim() and samples and len(leaf) % samples == 0):
            return leaf  # type: ignore[no-any-return]
    return None


def loss_of_all_rows(loss: Tensor | Counted, outputs: Sequence[Tensor]) -> float | None:
    """Return a loss that takes what models have returned from all ranks alone, as gathered.

    None for another one, and for one that is not finite.
    """
    if not isinstance(loss, Tensor):
        return None
    nodes = {*islice(nodes_behind([loss.grad_fn], is_of_all_ranks), MOST_NODES)}
    own = any(t.grad_fn in nodes for t in outputs)
    is_of_all = bool(outputs) and not own and any(map(is_of_all_ranks, nodes))
    return float(loss.detach()) if is_of_all and bool(loss.isfinite()) else None


class LossGraphCheck:
    """Looks at the losses of a loop, in the first steps and in two after each power of two.

    Without micro-batches each loss counts as a step, so of two that take turns both are looked at.

    Args:
        enabled: False, and nothing is looked at.
        accumulate: micro-batches of a step; if there are several, losses are theirs, and
            `begin_step` is called before the first one.
        note: prints a note once, with facts by name.
        parameters: returns the ids of parameters whose gradients are those of all ranks.
        has_whole_models: returns True if this rank has all weights, so that a pass may go through
            a model.
    """

    def __init__(
        self,
        data: Axis,
        enabled: bool,
        accumulate: int,
        note: Callable[..., None],
        parameters: Callable[[], Container[int]],
        has_whole_models: Callable[[], bool],
    ) -> None:
        self._data = data
        self._has_whole_models = has_whole_models
        self._parameters = parameters
        self._accumulate = accumulate
        self._note = note
        self._in_parts = accumulate > 1
        self._enabled = enabled and (self._in_parts or data.size > 1)
        self.restart()
        self._outputs: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)
        self._inner_outputs: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)
        self._differentiated: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)
        self._parts: list[LossPart] = []

    def restart(self) -> None:
        """Take the next step for the first one."""
        self._step = 0 if self._in_parts else 1

    def begin_step(self) -> None:
        """Forget what belongs to the step before."""
        self._step += 1
        self._clear_outputs()
        self._parts = []

    def _clear_outputs(self) -> None:
        for tensors in (self._outputs, self._inner_outputs, self._differentiated):
            tensors.clear()

    def add_outputs(self, output: Any, is_inner: bool = False) -> None:
        """Note what a model has returned, but for numbers: such a one may be the loss itself.

        Args:
            is_inner: a module has returned it to its model. These outputs count where models have
                returned only numbers, as a model does that computes its loss.
        """
        if self.is_due():
            outputs = self._inner_outputs if is_inner else self._outputs
            outputs.extend(t for t in tensors_in(output) if t.dim() and t.grad_fn)

    def add_gradients(self, of: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Note gradients that a loss may be computed from, as a gradient penalty is."""
        if self.is_due():
            self.add_outputs([gradient for gradient in gradients if gradient is not None])
            self._differentiated.extend(of)

    def compare(
        self, loss: Tensor | Counted, rows: int, samples: int, inputs: Sequence[Tensor] = ()
    ) -> None:
        """Compare a loss with those of other ranks and micro-batches. Collective.

        Args:
            samples: of this rank, of which outputs have one or several rows each; 0 if unknown.
            inputs: of the models.

        Raises: UsageError: on all ranks, if the loss is no mean over samples.
        """
        try:
            if self.is_due():
                outputs = [*(self._outputs or self._inner_outputs)]
                self._compare(loss, outputs, rows, samples, inputs)
        finally:
            self._clear_outputs()  # also what the comparison itself has differentiated
            if not self._in_parts:
                self.begin_step()

    def _compare(
        self,
        loss: Tensor | Counted,
        outputs: list[Tensor],
        rows: int,
        samples: int,
        inputs: Sequence[Tensor],
    ) -> None:
        place = f"rank {self._data.rank}"
        if self._in_parts:
            place += f", micro-batch {len(self._parts)}"
        own: list[Divisor] = []
        with suppress(RuntimeError):  # the graph was used and freed: the backward pass says it
            own = divisors_of(loss, rows, {output.grad_fn for output in outputs})
        self._parts.append(LossPart(place, rows, own))
        is_of_mean = any(is_mean_over(samples, each, outputs) for each in self._differentiated)
        fault = AVERAGED.format(place=place) if is_of_mean else ""
        values = [loss] if isinstance(loss, Tensor) else [term.value for term in loss.terms]
        total = torch.stack(values).sum()
        leaf = unprepared_leaf(total, outputs, samples, self._parameters())
        # Behind outputs that are held no longer lie gathered weights.
        may_pass = len(outputs) < MOST_OUTPUTS or self._has_whole_models()
        if leaf is not None and may_pass:
            self._note(UNPREPARED, shape=tuple(leaf.shape))
        if couples_samples(total, outputs, samples, self._has_whole_models()):
            fault = COUPLED.format(place=place)
        value = loss_of_all_rows(loss, outputs)
        lengths = [lengths_of(tensors, samples) for tensors in (inputs, outputs)]
        told = self._data.all_gather_json([fault, value, self._parts, lengths])
        _check_equal([value for _, value, *_ in told])
        parts = []
        for fault, _, of_rank, _ in told:
            if fault:
                raise UsageError(fault)
            for place, rows, divisors in of_rank:
                parts.append(LossPart(place, rows, [Divisor(*divisor) for divisor in divisors]))
        if text := objection(parts):
            raise UsageError(text)
        self._note_lengths([lengths for *_, lengths in told])
        if reason := doubt(parts):
            self._note(UNSEEN, reason=reason)
        is_one_mean = len(own) == 1 and not own[0].is_sum
        if self._in_parts and is_one_mean and own[0].outer == self._accumulate:
            self._note(DIVIDED, parts=self._accumulate)

    def _note_lengths(self, told: Sequence[Any]) -> None:
        """Note outputs as long as a rank's own samples. Args: told: lengths of inputs, outputs."""
        (first_given, first), *_ = told
        for rank, (given, returned) in enumerate(told):
            pairs = [pair for pair in zip(first, returned, strict=False) if pair[0] != pair[1]]
            if given == first_given and len(returned) == len(first) and pairs:
                self._note(LENGTHS, own=pairs[0][0], other=pairs[0][1], rank=rank)
                return

    def is_due(self) -> bool:
        """Return True where a step is looked at and a batch is computed in parts."""
        return self._enabled and self.is_early_step()

    def is_early_step(self) -> bool:
        """Return True in steps 1 to 5, 8, 9, 16, 17, ..."""
        step = self._step
        return step <= 4 or step & (step - 1) == 0 or (step - 1) & (step - 2) == 0


def _check_equal(losses: Sequence[float | None]) -> None:
    """Raise UsageError if ranks differ in a loss that all of them have computed from all rows."""
    values = [loss for loss in losses if loss is not None]
    if len(values) == len(losses) and not all(isclose(v, values[0], rel_tol=1e-5) for v in values):
        told = ", ".join(f"rank {rank} {value:.8g}" for rank, value in enumerate(values))
        raise UsageError(APART.format(losses=told))
