"""One step of a run on many ranks, compared with the same step of one process.

forward     outputs of modules, in the order in which they ended
loss        what the backward passes began with
backward    gradients of parameters, the last layer first
update      weights after the step
buffers     after the step

Tensors of all ranks are joined into the one tensor of one process, outputs and their gradients:

    data ranks       rows 0 1 2 | rows 3 4            joined along the batch, in order of ranks
    time first       t0r0 t1r0 | t0r1 t1r1            joined within each time
    micro-batches    rows 0 1 | row 2                 joined in the order of calls or ranks
    tensor ranks     columns 0-3 | columns 4-7        joined where their sizes add up
    fused layers     q0 k0 v0 | q1 k1 v1              query, key and value joined one by one

One process says which shape comes of it; a tensor that cannot have that shape is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from shoal.verification.differences import Tensors, differences
from shoal.verification.script.run_record import CallRecord, RankRecord, StepRecord, recorded
from shoal.verification.script.script_report import Phase, ScriptDifference

EXACT = 1e-10
"""For float64: far above the rounding of sums in another order, far below any error."""
FUSED = (2, 3)
"""Numbers of equal matrices that a layer may hold in one: gate and up; query, key and value."""
SAME_ORDER = 1e-6
"""Relative distance below which no other order of rows is tried."""
Pieces = list[list[Tensor]]
"""For each data rank the tensors of its micro-batches."""


class RecordedRun:
    """A recorded run on disk. Args: folder: of the record. ranks: its indices."""

    def __init__(self, folder: Path, ranks: list[RankRecord]) -> None:
        self.folder = folder
        self.ranks = ranks

    @property
    def steps(self) -> int:
        """Return the number of steps that all ranks have recorded."""
        return min(len(record.steps) for record in self.ranks)


def _places_of(step: StepRecord) -> dict[str, list[int]]:
    """Return the numbers of the calls of each module."""
    places: dict[str, list[int]] = {}
    for index, call in enumerate(step.calls):
        places.setdefault(call.module, []).append(index)
    return places


class StepComparison:
    """Compares one step.

    Args:
        reference, candidate: the run of one process, and that of many ranks.
        step: from 1.
        tolerance: the relative error that counts as rounding.

    Attributes:
        calls: of the reference.
        index: of the candidate's rank 0.
        errors: by "forward/<call>/<output>", "loss", "gradient/NAME", "weight/NAME",
            "buffer/NAME": relative errors.
    """

    def __init__(
        self, reference: RecordedRun, candidate: RecordedRun, step: int, tolerance: float
    ) -> None:
        self.step = step
        self.reference: StepRecord = reference.ranks[0].steps[step - 1]
        self.ranks: list[StepRecord] = [record.steps[step - 1] for record in candidate.ranks]
        self.index = self.ranks[0]
        self.calls: list[CallRecord] = self.reference.calls
        self.expected = recorded(reference.folder, 0, f"step-{step}")
        files = [recorded(candidate.folder, r.rank, f"step-{step}") for r in candidate.ranks]
        self.given = files[0]
        self._files = files
        self._records = candidate.ranks
        self._places = _places_of(self.reference)
        self._places_of_ranks = [_places_of(each) for each in self.ranks]
        self._tolerance = tolerance
        self.errors: dict[str, float] = {}
        self._found: list[ScriptDifference] = []
        self._last_call = {module: indices[-1] for module, indices in self._places.items()}

    def compare(self) -> list[ScriptDifference]:
        """Return all differences beyond the tolerance, the first one first."""
        self._forward()
        self._loss()
        self._backward()
        self._update()
        self._buffers()
        return self._found

    def output(self, kind: str, index: int, output: int) -> tuple[Tensor, list[Tensor]] | None:
        """Return a tensor of one process, and the joined one of the ranks; None if unknown.

        There are several of the ranks where they hold copies of it.

        Args: kind: "forward" or "backward". index: of the call. output: of the call.
        """
        like = self.expected.get(f"{kind}/{index}/{output}")
        if like is None:
            return None
        module = self.calls[index].module
        names = [f"{kind}/{i}/{output}" for i in self._places[module]]
        call = self._places[module].index(index)
        found = self._joined(kind, module, slice(call, None, len(names)), output, like)
        limit = SAME_ORDER * float(like.norm())
        is_near = found and all(distance(tensor, like) <= limit for tensor in found)
        known = [self.expected[name] for name in names if name in self.expected]
        whole = None if is_near or len(known) < max(2, len(names)) else along(0, known)
        if whole is not None:
            # One process has micro-batches too, and a rank has its own rows of all of them.
            rows = sum(len(tensor) for tensor in known[:call]), len(like)
            by_rank = self._joined(kind, module, slice(None), output, whole)
            cut = [tensor.narrow(0, *rows) for tensor in by_rank]
            nearest = min((distance(tensor, like) for tensor in cut), default=math.inf)
            found = cut if all(nearest < distance(tensor, like) for tensor in found) else found
        return (like, found) if found else None

    def _joined(
        self, kind: str, module: str, calls: slice, output: int, like: Tensor
    ) -> list[Tensor]:
        """Return the joined tensor of some calls of a module on each rank, in the order of ranks.

        Args: like: the tensor of one process.
        """
        groups: dict[int, dict[int, list[Tensor]]] = {}
        for record, files, places in zip(
            self._records, self._files, self._places_of_ranks, strict=True
        ):
            mine = places.get(module, [])
            names = [f"{kind}/{index}/{output}" for index in mine[calls]]
            is_whole = not len(mine) % (calls.step or 1) and all(name in files for name in names)
            if mine and is_whole:
                tensor, data = record.axis("tensor")[0], record.axis("data")[0]
                groups.setdefault(tensor, {})[data] = [files[name] for name in names]
        data_ranks = self._records[0].axis("data")[1]
        pieces = [
            [by_data[data] for data in sorted(by_data)]
            for by_data in groups.values()
            if len(by_data) >= data_ranks
        ]
        return versions(pieces, like, has_stand_ins=self._records[0].by_shoal)

    def last_output_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return the gradient of the last output that has one: of one process, of the ranks.

        Scalars are left out: they are losses that models return.
        """
        for index in range(len(self.calls) - 1, -1, -1):
            for output in range(self.calls[index].outputs):
                pair = self.output("backward", index, output)
                if pair is not None and pair[0].dim():
                    return pair[0], pair[1][0]
        return None

    @property
    def direction(self) -> float:
        """How far a gradient may be from a multiple of that of one process."""
        return max(1e-6, 10 * self._tolerance)

    def _forward(self) -> None:
        places = [(i, o) for i, call in enumerate(self.calls) for o in range(call.outputs)]
        pairs = {place: self.output("forward", *place) for place in places}
        # A scalar is a loss that a model returns: that of a rank's own rows.
        known = {k: pair for k, pair in pairs.items() if pair is not None and pair[0].dim()}
        copies = max((len(versions) for _, versions in known.values()), default=0)
        # All at once, for a tensor of zeros is measured by the others.
        worst: dict[str, float] = {}
        for copy in range(copies):
            given = {f"{i}/{o}": pair[1][copy % len(pair[1])] for (i, o), pair in known.items()}
            expected = {f"{i}/{o}": pair[0] for (i, o), pair in known.items()}
            for key, error in differences(expected, given).items():
                worst[key] = max(worst.get(key, 0.0), math.inf if math.isnan(error) else error)
        for index, output in known:
            call, key = self.calls[index], f"{index}/{output}"
            self._note(f"forward/{key}", worst[key], "forward", None, call.line, call.module)

    def _loss(self) -> None:
        expected = sum(self.reference.losses)
        # Of a pipeline only the last stage may have one.
        each = [sum(step.losses) for step in self.ranks if step.losses]
        if not self.reference.losses or not each:
            return
        # Under Shoal each rank has the global mean, elsewhere the loss of its own rows.
        given = sum(each) / len(each)
        by_shoal = self._records[0].by_shoal
        worst = max(abs(value - expected) for value in each)
        distance = worst if by_shoal else abs(given - expected)
        error = distance / max(abs(expected), 1e-12)
        line = self.index.lines.get("backward", "")
        self._note("loss", error, "loss", None, line)

    def _backward(self) -> None:
        if not self.index.gradients and not self._records[0].is_synchronous:
            return
        # Parameters without a gradient count too.
        expected, given = (
            {**dict.fromkeys(step.gradients), **tensors.below("gradient")}
            for step, tensors in ((self.reference, self.expected), (self.index, self.given))
        )
        errors = self._errors("gradient", expected, given)
        for name in sorted(errors, key=self._order, reverse=True):
            line = self._line_of(name) or self.index.lines.get("backward", "")
            self._note(f"gradient/{name}", errors[name], "backward", name, line)

    def _update(self) -> None:
        expected, given = self.expected.below("weight"), self.given.below("weight")
        errors = self._errors("weight", expected, given) if given else {}
        line = self.index.lines.get("step", "")
        for name in sorted(errors, key=self._order):
            self._note(f"weight/{name}", errors[name], "update", name, line)

    def _buffers(self) -> None:
        expected = self.expected.below("buffer")
        for files in self._files:
            given = files.below("buffer")
            # A stage of a pipeline holds the buffers of its own layers.
            own: Mapping[str, Tensor | None] = {n: t for n, t in expected.items() if n in given}
            for name, error in differences(own, given).items():
                key = f"buffer/{name}"
                if not self.errors.get(key, -1.0) >= error:
                    self._note(key, error, "buffers", name, self._line_of(name))

    def _errors(self, kind: str, expected: Tensors, given: Tensors) -> dict[str, float]:
        """Return the error of each parameter's tensor, on rank 0 and of other ranks to it."""
        errors = differences(expected, given)
        for name, error in self._apart(kind).items():
            errors[name] = max(errors.get(name, 0.0), error)
        return errors

    def _apart(self, kind: str) -> dict[str, float]:
        """Return how far other ranks' values lie from rank 0's, by name."""
        apart: dict[str, float] = {}
        first = self.index.digests
        for other in self.ranks[1:]:
            for key, (norm, projection) in other.digests.items():
                if not key.startswith(f"{kind}/") or key not in first:
                    continue
                distance = max(abs(norm - first[key][0]), abs(projection - first[key][1]))
                size = max(abs(norm), abs(first[key][0]), 1e-300)
                name = key.removeprefix(f"{kind}/")
                apart[name] = max(apart.get(name, 0.0), distance / size)
        return apart

    def apart(self, kind: str = "gradient") -> dict[str, float]:
        """Return how far values of ranks lie apart, where that is beyond the tolerance."""
        apart = self._apart(kind)
        return {name: error for name, error in apart.items() if not error <= self._tolerance}

    def depends_on_rows(self, buffer: str) -> bool:
        """Return True if a buffer differs between ranks, or was updated in several passes."""
        key = f"buffer/{buffer}"
        values = [files[key] for files in self._files if key in files]
        if any(not values[0].equal(value) for value in values[1:]):
            return True
        module = buffer.rpartition(".")[0]
        once = len(self._places.get(module, ()))
        return any(len(places.get(module, ())) > once for places in self._places_of_ranks)

    def _order(self, name: str) -> int:
        """Return when a parameter's module ended last; modules that were not called come first."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in self._last_call:
                return self._last_call[module]
        return -1

    def _line_of(self, name: str) -> str:
        """Return the line that called the module of a parameter or buffer last; "" for none."""
        index = self._last_call.get(name.rpartition(".")[0])
        return "" if index is None else self.calls[index].line

    def _note(
        self,
        key: str,
        error: float,
        phase: Phase,
        parameter: str | None,
        line: str,
        module: str | None = None,
    ) -> None:
        """Note an error, and a difference where it is beyond the tolerance.

        Args: module: that of the parameter, where it is not given.
        """
        error = math.inf if math.isnan(error) else error
        self.errors[key] = max(error, self.errors.get(key, 0.0))
        if error <= self._tolerance:
            return
        if parameter is not None:
            module = parameter.rpartition(".")[0]
        self._found.append(
            ScriptDifference(self.step, phase, module, parameter, error, self._tolerance, line)
        )


def versions(groups: list[Pieces], like: Tensor, has_stand_ins: bool) -> list[Tensor]:
    """Return what the pieces of each tensor rank give, as tensors of the shape of `like`.

    Several where ranks hold copies of it; none if unknown.

    Args: has_stand_ins: ranks without rows of their own have computed one of another rank.
    """
    for dim in range(min(2, like.dim())):
        joined = [along(dim, [*chain.from_iterable(group)]) for group in groups]
        found = [tensor for tensor in joined if tensor is not None]
        if not found or len(found) < len(groups):  # the pieces of one do not fit
            continue
        cut = [_without_stand_ins(t, like, dim) for t in found] if has_stand_ins else found
        if all(tensor.shape == like.shape for tensor in cut):
            pairs = zip(cut, groups, strict=True)
            return [_in_order(tensor, group, dim, like) for tensor, group in pairs]
        whole = _columns(cut, like)
        if whole is not None:
            return [whole]
    copies = [part for group in groups for part in chain.from_iterable(group)]
    return copies if copies and all(part.shape == like.shape for part in copies) else []


def _in_order(joined: Tensor, group: Pieces, dim: int, like: Tensor) -> Tensor:
    """Return the joined rows in the order of one process, where the batch is not outermost.

    A model that puts time first and then flattens both gives rows (time, sample). As for columns,
    the order that comes nearest counts.
    """
    parts = [*chain.from_iterable(group)]
    if len(parts) < 2 or distance(joined, like) <= SAME_ORDER * float(like.norm()):
        return joined
    outer = gcd(*(part.shape[dim] for part in parts))
    return _nearest(joined, parts, dim, range(2, outer + 1), like)


def _nearest(
    joined: Tensor, parts: list[Tensor], dim: int, counts: Iterable[int], like: Tensor
) -> Tensor:
    """Return parts in the order that comes nearest to one process: as they are, or block by block.

    Args:
        joined: the parts as they are.
        counts: numbers of blocks, each part having a share of each: times, or matrices.
    """
    orders = [joined]
    for count in counts:
        if not any(part.shape[dim] % count for part in parts):
            blocks = zip(*(part.chunk(count, dim) for part in parts), strict=True)
            order = torch.cat([*chain.from_iterable(blocks)], dim)
            orders += [order] if order.shape == like.shape else []
    return min(orders, key=lambda order: distance(order, like))


def along(dim: int, parts: list[Tensor]) -> Tensor | None:
    """Return tensors joined along a dimension; None where their other sizes differ."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts if part.dim() > dim}
    if len(shapes) != 1 or any(part.dim() <= dim for part in parts):
        return None
    return torch.cat(parts, dim)


def _without_stand_ins(tensor: Tensor, like: Tensor, dim: int) -> Tensor:
    """Return a tensor without the rows of ranks that had none of their own; they come last."""
    excess = tensor.shape[dim] - like.shape[dim]
    same = [n for d, n in enumerate(tensor.shape) if d != dim]
    if excess > 0 and same == [n for d, n in enumerate(like.shape) if d != dim]:
        return tensor.narrow(dim, 0, like.shape[dim])
    return tensor


def _columns(parts: list[Tensor], like: Tensor) -> Tensor | None:
    """Return slices of tensor ranks as one tensor, if their sizes add up in one dimension.

    Nothing records whether a layer holds several matrices in one, of which each rank has a slice
    of each. So the order that comes nearer to one process counts; a layer whose columns are in a
    wrong order is found by what the next one makes of them.
    """
    if len(parts) < 2 or any(part.dim() != like.dim() for part in parts):
        return None
    for dim in range(like.dim()):
        if sum(part.shape[dim] for part in parts) == like.shape[dim]:
            whole = along(dim, parts)
            if whole is not None and whole.shape == like.shape:
                return _nearest(whole, parts, dim, FUSED, like)
    return None


def distance(tensor: Tensor, like: Tensor) -> float:
    """Return the norm of the difference; infinity where it is not a number."""
    distance = float((tensor - like).norm())
    return math.inf if math.isnan(distance) else distance
