"""The trial of a loss: are its gradients on a batch the means of those on parts of the batch?"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.tree_map import tensors_in
from shoal.errors import ShoalError
from shoal.platform.script_line import script_line
from shoal.trial.batch_rows import choose_rows, take_rows
from shoal.trial.compare_parts import LossOnRows, Measured, SplitError, distance, distance_of_repeat
from shoal.trial.draws_of_parts import DrawnInParts, RecordedDraws
from shoal.trial.float64_functions import Float64Functions
from shoal.trial.loss_verdict import CannotTry, LossKind, LossVerdict
from shoal.trial.reached import Place
from shoal.trial.untouched import Untouched

MAX_ROWS = 16
"""Rows of a batch that are enough for the passes through whole models."""
TOLERANCE = 1e-4
"""Relative error in float32: 2e-7 at most for a mean over samples, 5e-3 at least if coupled."""
MOST_NUMBERS = 8
"""Numbers of the script that are changed, one after the other."""
TOLERANCE_IN_HALF = 0.4
"""Relative error up to which 16-bit rounding may be the cause: no verdict."""
_MEANS = (LossKind.MEAN, LossKind.COUNTED)
_ANSWERS = (*_MEANS, LossKind.COUPLED)


def try_loss(
    compute_loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
    models: Sequence[nn.Module],
    drawn_sizes: Sequence[int] = (),
    own_numbers: Mapping[str, Place] | None = None,
    in_parts: bool = False,
) -> LossVerdict:
    """Judge a loss by its gradients on rows of a batch and on parts of them.

    Runs the models four times on at most `MAX_ROWS` rows, and more often where parts differ.
    Changes nothing, and makes no collective: the models must be whole on this rank.

    Args:
        num_samples: dimension 0 of the tensors in `args` and `kwargs`.
        models: the modules that `compute_loss` calls; gradients of their parameters are compared.
        drawn_sizes: samples that a rank computes at once, where `draws="global"`.
        own_numbers: numbers of the script that differ on ranks.
        in_parts: a step cuts dimension 0 of the batch, for micro-batches.
    """
    if num_samples < 2:
        return LossVerdict(LossKind.NOT_JUDGED)

    chosen = choose_rows((args, kwargs), num_samples, MAX_ROWS)

    def compute(rows: Tensor, dims: Sequence[int] = (0, 1)) -> Any:
        rows = chosen[rows] if len(rows) <= len(chosen) else rows  # more: of the whole batch
        taken_args, taken_kwargs = take_rows((args, dict(kwargs)), rows, num_samples, dims)
        return compute_loss(*taken_args, **taken_kwargs)

    try:
        with Untouched(models, compute_loss) as state:
            judge = LossJudge(compute, state, len(chosen))
            verdict = judge.verdict(all_rows=num_samples)
            if verdict.kind is LossKind.COUPLED:
                verdict = _judged_in_float64(judge) or verdict
            # A sequence may be as long as the batch: then either dimension may be the samples.
            shapes = {tensor.shape[:2] for tensor in tensors_in([args, dict(kwargs)])}
            if verdict.objects and not in_parts and (num_samples, num_samples) in shapes:
                time_first = partial(compute, dims=(1, 0))
                other = LossJudge(time_first, state, len(chosen))
                if (found := other.verdict()).kind in (*_MEANS, LossKind.SUM):
                    judge, verdict = other, found
            if verdict.kind in _MEANS:
                memory = judge.memory() if state.script_was_changed else 0.0
                names = judge.numbers_read(own_numbers or {})
                verdict = replace(verdict, memory=memory, own_numbers=names)
        return replace(verdict, misplaced=judge.draws.misplaced(drawn_sizes))
    except CannotTry as why:
        return LossVerdict(LossKind.NOT_JUDGED, reason=why.reason)


def _judged_in_float64(judge: LossJudge) -> LossVerdict | None:
    """Return the verdict in float64, or None if the function cannot compute in it.

    In a deep network of ReLUs rounding switches a few units that are near 0, and their gradients
    jump; a convolution of one image may be computed in another way than one of two; and where a
    model has nearly learned its samples, what is left of the gradients may be rounding.
    """
    judge.arithmetic = Float64Functions()
    try:
        verdict = judge.verdict()
    except CannotTry:
        return None
    return verdict if verdict.kind in _ANSWERS else None


class LossJudge:
    """The passes of one trial.

    Args:
        compute: (rows) -> the result of the user's function on these rows.
        state: entered by the caller; gradients of the parameters of its models are compared.
        num_rows: rows of the whole.

    Attributes:
        arithmetic: a context of each pass.
        draws: random numbers drawn on all rows; parts get those of their rows.
    """

    def __init__(self, compute: Callable[[Tensor], Any], state: Untouched, num_rows: int) -> None:
        self.arithmetic: AbstractContextManager[Any] = nullcontext()
        self._loss, self._state = LossOnRows(compute, state.parameters), state
        self._num_rows = num_rows
        self._all = torch.arange(num_rows)
        self._order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))

    def verdict(self, all_rows: int = 0) -> LossVerdict:
        """Judge the loss.

        Args: all_rows: of the batch, for a function that fails on `num_rows` of them.

        Raises: CannotTry: see `take_rows`, `LossOnRows` and `DrawnInParts`.
        """
        self.draws = RecordedDraws(self._num_rows)
        try:
            whole = self._pass(lambda: self._loss.whole(self._all), None)
        except _FailedError as failed:
            if all_rows > self._num_rows:  # it may be the rows that are missing
                self.draws = RecordedDraws(all_rows)
                with suppress(_FailedError):
                    self._pass(lambda: self._loss.whole(torch.arange(all_rows)), None)
                    sizes = self._num_rows, all_rows
                    return LossVerdict(LossKind.FAILS_ON_PARTS, sizes=sizes, reason=failed.text)
            return _cannot(f"it fails with {failed.text}")
        verdict = self._compare(whole)
        if verdict.kind is LossKind.COUPLED and self.draws.repeats_rows:
            # The draws of a row may lie side by side, or once in each of several blocks.
            self.draws.in_blocks = True
            in_blocks = self._compare(whole)
            verdict = verdict if in_blocks.objects else in_blocks
        if verdict.kind is LossKind.COUPLED and self.draws.uncut:
            return _cannot(f"the random numbers of {self.draws.uncut} have no rows of their own")
        return self._confirmed(verdict, whole) if verdict.objects else verdict

    def memory(self) -> float:
        """Return the relative difference between the gradients of all rows after a pass over one
        half and after one over the other: above 0 if the function keeps samples, as a queue does.

        A function that fails now, as one that keeps a state for each row, gives 0.
        """
        half = self._num_rows // 2
        after = []
        try:
            for rows in self._order[: 2 * half].split(half):
                self._part(rows.sort().values)
                after.append(
                    self._pass(lambda: self._loss.whole(self._all), self._all, fresh=False)
                )
        except CannotTry:
            return 0.0
        difference = distance_of_repeat(*after)
        return difference if difference > TOLERANCE else 0.0

    def numbers_read(self, numbers: Mapping[str, Place]) -> tuple[str, ...]:
        """Return the names of those on which the loss or its gradients depend, and of those that
        are too large to be tried.
        """
        names = []
        for name, number in [*numbers.items()][:MOST_NUMBERS]:
            if number.write is None:
                names.append(name)
                continue

            def changed(number: Place = number) -> Measured:
                number.change()
                return self._loss.whole(self._all)

            try:
                whole = self._measure_again()
                if distance_of_repeat(whole, self._pass(changed, self._all)) > TOLERANCE:
                    names.append(name)
            except CannotTry:
                continue
        return tuple(names)

    def _measure_again(self) -> Measured:
        return self._pass(lambda: self._loss.whole(self._all), self._all)

    def _compare(self, whole: Measured) -> LossVerdict:
        """Compare the whole with three parts of it; if they differ, with two, to tell what it is.

        A loss that is no mean over samples has another mean over any parts.
        """
        errors: list[SplitError] = []
        failure: _FailedError | None = None
        n = self._num_rows
        third, half = max(1, n // 3), n // 2
        splits = (1, third, n - 1 - third), (third, n - third), (1, n - 1), (half, n - half)
        for sizes in splits:
            # Keep the order of rows: packed sequences ask for rows that are sorted by length.
            parts = [rows.sort().values for rows in self._order.split([s for s in sizes if s])]
            try:
                errors.append(distance(whole, [self._part(rows) for rows in parts]))
            except _FailedError as failed:
                failure = failure or failed
                errors.append(SplitError(sizes, 1.0, 1.0))
            if errors[0].mean < TOLERANCE:
                kind = LossKind.COUNTED if whole.counts else LossKind.MEAN
                return LossVerdict(kind, errors[0].mean)
        return self._difference(whole, errors, failure)

    def _difference(
        self, whole: Measured, errors: list[SplitError], failure: _FailedError | None
    ) -> LossVerdict:
        """Return the verdict where parts fail, or where their gradients have another mean."""
        if all(error.sum < TOLERANCE for error in errors):
            return LossVerdict(LossKind.SUM, max(error.sum for error in errors))
        worst = max(errors, key=lambda error: error.mean)
        if self._num_rows >= 4 and self._needs_two_rows(whole, errors):
            reason = failure.text if failure else "it gives a loss that is not finite"
            return LossVerdict(LossKind.NEEDS_TWO_ROWS, reason=reason)
        sizes = (*worst.sizes, self._num_rows)
        if failure is not None:
            return LossVerdict(
                LossKind.FAILS_ON_PARTS,
                max((error.mean for error in errors if error.mean < 1.0), default=0.0),
                sizes=(failure.num_rows, self._num_rows),
                reason=failure.text,
            )
        return LossVerdict(LossKind.COUPLED, worst.mean, sizes)

    def _needs_two_rows(self, whole: Measured, errors: list[SplitError]) -> bool:
        """Return True if only parts of one row differ, by an error or NaN, as in BatchNorm."""
        if any(error.mean >= TOLERANCE and 1 not in error.sizes for error in errors):
            return False
        if not any(error.mean == 1.0 for error in errors):
            return False
        try:
            parts = [self._part(self._order[:2]), self._part(self._order[2:])]
        except _FailedError:
            return False
        return distance(whole, parts).mean < TOLERANCE

    def _confirmed(self, verdict: LossVerdict, whole: Measured) -> LossVerdict:
        """Return the objection, if it is neither randomness nor rounding."""
        if self._loss.is_rounding(whole):
            return _cannot("its gradients are zero but for rounding")
        try:
            again = self._measure_again()
            if distance_of_repeat(whole, again) > TOLERANCE:
                return _cannot("the same samples give another loss when they are tried again")
            self._state.reseed(1)
            other = self._measure_again()
            if distance_of_repeat(whole, other) > TOLERANCE:
                return _cannot("it draws numbers from numpy or random, which no part can share")
        except _FailedError as failed:
            return _cannot(f"it fails when it is tried again, with {failed.text}")
        finally:
            self._state.reseed(None)
        if self.draws.half and verdict.difference < TOLERANCE_IN_HALF:
            return _cannot("it computes in 16 bits, whose rounding hides the answer")
        return verdict

    def _part(self, rows: Tensor) -> Measured:
        return self._pass(lambda: self._loss.part(rows, self._num_rows), rows)

    def _pass(
        self, measure: Callable[[], Measured], rows: Tensor | None, fresh: bool = True
    ) -> Measured:
        """Measure with everything put back before it, and draws recorded or handed out.

        Args: fresh: False to leave what the pass before has changed in the script.

        Raises: _FailedError: the function failed.
        """
        self._state.restore(script=fresh)
        mode = DrawnInParts(self.draws, rows)
        try:
            with torch.enable_grad(), mode, self.arithmetic:
                measured = measure()
        except CannotTry:
            raise
        except Exception as error:
            size = self._num_rows if rows is None else len(rows)
            raise _FailedError(error, size) from error
        mode.finish()
        return measured


class _FailedError(CannotTry):
    """The user's function raised an error."""

    def __init__(self, error: Exception, num_rows: int) -> None:
        message = str(error).split("\n")[0][:200]
        innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        line = script_line(innermost)
        name = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
        self.text = f"{name}{message}{f' at {line}' if line else ''}"
        self.num_rows = num_rows
        super().__init__(self.text)


def _cannot(reason: str) -> LossVerdict:
    return LossVerdict(LossKind.NOT_JUDGED, reason=reason)
