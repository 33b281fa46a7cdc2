"""`Run.gather` with micro-batches: the gathered rows and their gradients, before the step itself.

    1. values      each micro-batch                       own rows of each gather
                   one message for each gather            rows of all micro-batches of all ranks
    2. gradients   each micro-batch, with these rows      what its loss asks of all rows
                   one sum over ranks for each gather     what the whole loss asks of each row
    3. step        each micro-batch as always             its loss, plus own rows x what is asked

No graph of more than one micro-batch is in memory, and the gradients are those of one batch: three
forward passes instead of one. A function that gathers nothing makes the first pass once, in its
first step, and leaves no trace in it.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.comm.row_collectives import count_rows, gather_rows
from shoal.data.seeds import MicrobatchSeeds
from shoal.data.tree_map import tensors_in
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.torch_private.subclasses import DisableTorchFunction
from shoal.run.step import code_of
from shoal.strategies import base
from shoal.strategies.local_step import weighted_loss
from shoal.strategies.loss_terms import Counted, Term, split_result
from shoal.trial.untouched import devices_of, leaving_no_trace

_Answer = Callable[[Tensor], tuple[Tensor, slice]]
_MakeFunction = Callable[[int, base.LocalBatch], tuple[Callable[..., Any], str]]
"""(number of a micro-batch, it) -> a function of its batch, and what that is for."""

TOLERANCE = 1e-3
"""Relative difference of gathered rows between two passes. Repeated kernels differ by rounding."""


class Passes(NamedTuple):
    """Passes over the micro-batches of a step, and the facts that they share.

    Attributes: seeds: the same for all stages of a pipeline.
    """

    microbatches: list[base.LocalBatch]
    model: base.LocalModel
    seeds: MicrobatchSeeds

    def results(self, made: _MakeFunction) -> Iterator[tuple[int, base.LocalBatch, Any]]:
        """Call what `made` makes of the function of each micro-batch; yield what that returns."""
        for index, micro in enumerate(self.microbatches):
            function, purpose = made(index, micro)
            function = base.LossWrapper(micro.step.compute_loss, function, f"gather: {purpose}")
            self.seeds.host.restore()
            # With a graph, for compute_loss may take gradients itself; it ends with the call.
            with torch.enable_grad():
                result = self.model.outside_step.call(function, *micro.args, **micro.kwargs)
            self.model.outside_step.reshard()
            yield index, micro, result


class GatheredRows(NamedTuple):
    """The result of one `gather` of a step, for all micro-batches of this rank.

    Attributes:
        rows: of all ranks; a leaf while its gradient is taken.
        windows: the rows of each micro-batch of this rank.
        asked: what the whole loss asks of the rows; None for rows without a gradient.
        is_data: they are rows of batches, so any stage of a pipeline may use them.
    """

    rows: Tensor
    windows: list[slice]
    asked: Tensor | None = None
    is_data: bool = False


class MicrobatchGathering:
    """Answers `gather` inside of the passes of a step with micro-batches.

    Args: models: the prepared models, which may become more.
    """

    def __init__(self, mesh: Mesh, models: Sequence[nn.Module]) -> None:
        self._data = mesh.data
        self._pipeline = mesh.pipeline
        self._models = models
        self._known: dict[object, bool] = {}
        self.answer: _Answer | None = None  # inside of a pass that gathers here
        self._given: list[Tensor] = []

    def is_known(self, function: base.ComputeLoss) -> bool:
        """Return whether a function was seen to gather; the same on all ranks."""
        return self._known.get(code_of(function), False)

    def note(self, function: base.ComputeLoss, gathers: bool) -> None:
        """Note if a function was seen to gather, on any rank. Collective."""
        self._known[code_of(function)] = self._on_any_rank(gathers)

    def gather(self, x: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all micro-batches, and where those of this one are."""
        assert self.answer is not None
        self._given.append(x)
        return self.answer(x)

    def prepare(
        self, batch: base.LocalBatch, microbatches: list[base.LocalBatch], model: base.LocalModel
    ) -> base.LocalBatch:
        """Return the batch that the step is to compute. Collective.

        A function that reads from an iterator is left alone, for it cannot be called again.

        Args: microbatches: of the batch, as the step will compute them, with the user's function.

        Raises: StrategyRefused: rows that are gathered follow from others.
        """
        function = microbatches[0].step.compute_loss
        key = code_of(function)
        if not self._known.get(key, True):
            return batch
        given = batch.args, batch.kwargs
        with leaving_no_trace(self._models, function, given) as can_repeat:
            passes = Passes(microbatches, model, self._seeds())
            values = []
            if not self._on_any_rank(not can_repeat):
                values = self._values(passes)
        num_gathers = self._on_any_rank(bool(values))
        self._known[key] = self._known.get(key, False) or num_gathers
        if not num_gathers:
            return batch
        gathered = [self._gathered(rows, are_data, microbatches) for rows, are_data in values]
        with leaving_no_trace(self._models, function, given):
            asked = self._asked(gathered, [rows for rows, _ in values], passes)
        self._seeds()  # the next step draws others
        of_microbatch = self._injecting(function, asked, passes)
        return batch._replace(step=batch.step._replace(of_microbatch=of_microbatch))

    def _values(self, passes: Passes) -> list[tuple[list[Tensor], list[bool]]]:
        """[1] Return for each gather the own rows of each micro-batch. Collective.

        With each whether they are rows of the batch, which no gradient is asked of.
        """

        def made(index: int, micro: base.LocalBatch) -> tuple[Callable[..., Any], str]:
            share = micro.step.global_batch_size / max(micro.num_samples, 1)

            def stand_in(x: Tensor) -> tuple[Tensor, slice]:
                # Any rows will do, if what is gathered later does not follow from them.
                order = torch.arange(max(round(len(x) * share), len(x)), device=x.device)
                return x.detach()[order % max(len(x), 1)], slice(0, len(x))

            def give(*args: Any, **kwargs: Any) -> list[tuple[Tensor, bool]]:
                # Where tensors of the batch begin in memory that need no gradient.
                given = [t for t in tensors_in((args, kwargs)) if not t.requires_grad]
                data = {t.data_ptr() for t in given if t.numel()}
                with self._answering(stand_in), passes.seeds.of(index):
                    micro.step.compute_loss(*args, **kwargs)
                return [(x, x.data_ptr() in data) for x in self._given]

            # The number of rows in the answer follows from both.
            return give, f"values {micro.num_samples} of {micro.step.global_batch_size}"

        found = [
            [(x.detach().clone(), is_data) for x, is_data in given]
            for _, _, given in passes.results(made)
        ]
        if len({len(given) for given in found}) > 1:
            raise UsageError(
                f"run.gather was called {' and '.join(str(len(given)) for given in found)} times "
                "in the micro-batches of one step. Every part of a batch must call it equally "
                "often."
            )
        return [([x for x, _ in own], [d for _, d in own]) for own in zip(*found, strict=True)]

    def _gathered(
        self, own: list[Tensor], are_data: list[bool], microbatches: list[base.LocalBatch]
    ) -> GatheredRows:
        """Return the rows of all micro-batches of all ranks. Collective."""
        rows = [
            x if micro.num_samples else x[:0] for x, micro in zip(own, microbatches, strict=True)
        ]
        together = torch.cat(rows)
        counts = count_rows(together, self._data)
        start = sum(counts[: self._data.rank])
        windows = []
        for x, micro in zip(own, microbatches, strict=True):
            # A stand-in is the first sample of the batch, so its row is among those of others.
            windows.append(slice(start, start + len(x)) if micro.num_samples else slice(0, len(x)))
            start += len(x) if micro.num_samples else 0
        rows_of_all = gather_rows(together, self._data, counts)
        is_data = not self._on_any_rank(not all(are_data))
        return GatheredRows(rows_of_all, windows, is_data=is_data)

    def _asked(
        self, gathered: list[GatheredRows], values: list[list[Tensor]], passes: Passes
    ) -> list[GatheredRows]:
        """[2] Return the gathered rows with what the whole loss asks of them. Collective."""
        leaves = [
            g._replace(
                rows=g.rows.detach().requires_grad_(g.rows.is_floating_point() and not g.is_data)
            )
            for g in gathered
        ]
        roots = [leaf.rows for leaf in leaves if leaf.rows.requires_grad]

        def made(index: int, micro: base.LocalBatch) -> tuple[Callable[..., Any], str]:
            def ask(*args: Any, **kwargs: Any) -> tuple[Sequence[Tensor | None], list[Tensor]]:
                # A pipeline calls it without autograd.
                with torch.enable_grad(), self._answering(self._rows_of(leaves, index)):
                    with passes.seeds.of(index):
                        result = micro.step.compute_loss(*args, **kwargs)
                    given = [x.detach() for x in self._given]  # in the stage that has made them
                    return _gradients(result, roots, micro), given

            return ask, f"asked {shapes_of_rows(leaves)}"

        sums = [torch.zeros_like(root) for root in roots]
        is_same = True
        for index, micro, (found, given) in passes.results(made):
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None and micro.num_samples:
                    total += gradient
            before = [own[index] for own in values]
            is_same &= len(before) == len(given) and all(map(_close, given, before))
        if self._on_any_rank(not is_same):
            raise StrategyRefused(
                "run.gather with accumulate: the rows that are gathered are others when "
                "compute_loss runs again. They follow from rows that were gathered before, or from "
                "random numbers that are not torch's, Python's or NumPy's. Use accumulate=1."
            )
        totals = iter([self._data.all_reduce(total) for total in sums])
        return [
            leaf._replace(asked=next(totals) if leaf.rows.requires_grad else None)
            for leaf in leaves
        ]

    def _on_any_rank(self, fact: bool) -> bool:
        """Return whether a fact holds on any rank. Collective."""
        return self._pipeline.on_any_rank(self._data.on_any_rank(fact))

    def _seeds(self) -> MicrobatchSeeds:
        """Return the seeds of a step: the same for all stages of a pipeline. Collective there."""
        return MicrobatchSeeds(devices_of(self._models), self._pipeline.broadcast_json)

    def _rows_of(self, gathered: list[GatheredRows], index: int) -> _Answer:
        """Return the answer to the gathers of one micro-batch."""

        def answer(x: Tensor) -> tuple[Tensor, slice]:
            found = gathered[len(self._given) - 1]
            return found.rows.to(x.dtype), found.windows[index]

        return answer

    def _injecting(
        self, compute_loss: base.ComputeLoss, gathered: list[GatheredRows], passes: Passes
    ) -> Callable[[int], base.ComputeLoss]:
        """[3] Return the function of each micro-batch of the step, by its number."""
        constant = [g._replace(rows=g.rows.detach()) for g in gathered]
        purpose = f"gather: step {shapes_of_rows(gathered)}"

        def compute(index: int, *args: Any, **kwargs: Any) -> Any:
            micro = passes.microbatches[index]
            with self._answering(self._rows_of(constant, index)), passes.seeds.of(index):
                result = compute_loss(*args, **kwargs)
            addend: Any = 0.0
            for x, found in zip(self._given, constant, strict=True):
                if found.asked is not None:
                    # A stand-in asks nothing, and needs a graph all the same.
                    asked = found.asked[found.windows[index]] if micro.num_samples else 0.0
                    addend = addend + (asked * x).sum()
            if not isinstance(addend, Tensor):
                return result
            # The gradient alone: the value of the loss stays what it is.
            return with_gradient(result, addend - addend.detach(), micro)

        def of_microbatch(number: int) -> base.ComputeLoss:
            return base.LossWrapper(compute_loss, partial(compute, number), purpose)

        return of_microbatch

    @contextmanager
    def _answering(self, answer: _Answer) -> Iterator[None]:
        self._given = []
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None


def _gradients(
    result: Any, roots: Sequence[Tensor], micro: base.LocalBatch
) -> Sequence[Tensor | None]:
    """Return the gradients of a loss by gathered rows; None where it does not depend on them."""
    terms, _ = split_result(result)
    if not (roots and any(term.value.requires_grad for term in terms)):
        return [None] * len(roots)
    # Of the loss of the last stage, if there are stages.
    with DisableTorchFunction():
        only_loss = result[0] if isinstance(result, tuple) else result
        loss = weighted_loss(only_loss, micro).loss
        return torch.autograd.grad(loss, roots, allow_unused=True)


def with_gradient(result: Any, addend: Tensor, micro: base.LocalBatch) -> Any:
    """Return a result of compute_loss whose loss has `addend` more, undivided by any weight."""
    terms, _ = split_result(result)
    weight = 1.0 if micro.step.loss_weight is None else micro.step.loss_weight
    first = terms[0]
    scale: Any = float(micro.step.global_batch_size)  # what `weighted_loss` divides a sum by
    if first.count is None or micro.step.loss_weight is not None:
        scale = scale / (max(micro.num_samples, 1) * weight)
    if first.count is not None and micro.step.loss_weight is not None:
        scale = scale * first.count.clamp(min=1)
    replaced = Term(first.value + addend * scale, first.count)
    loss: Any = result[0] if isinstance(result, tuple) else result
    loss = Counted((replaced, *terms[1:])) if isinstance(loss, Counted) else replaced.value
    return (loss, result[1]) if isinstance(result, tuple) else loss


def shapes_of_rows(gathered: Sequence[GatheredRows]) -> list[list[int]]:
    """Return the shape of each gather's rows."""
    return [list(each.rows.shape) for each in gathered]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.detach(), other, rtol=TOLERANCE, atol=1e-6, equal_nan=True)
