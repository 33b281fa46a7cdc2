"""A trial on outputs that models have given already: no model runs, and no rank waits for another.

    real pass    compute_loss ──> model(x)      outputs recorded, graph kept as it is
    trial        compute_loss ──> rows of the recorded outputs, as leaves in float64
                 compared: the loss, and its gradients with respect to the outputs, row by row

Blind to what happens inside of models. Where the function uses more of a model than its outputs, or
calls it otherwise for fewer samples, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.module_state import replace_call
from shoal.platform.torch_private.tensor_state import in_function_transform
from shoal.trial.batch_rows import map_nest, take_rows
from shoal.trial.guess_cause import guess_cause
from shoal.trial.judge_loss import TOLERANCE, TOLERANCE_IN_FLOAT64, LossJudge
from shoal.trial.loss_verdict import CannotTry, LossKind, LossVerdict
from shoal.trial.untouched import Untouched

_DIVIDES = (LossKind.MEAN, LossKind.COUNTED)


class RecordedCall(NamedTuple):
    """One call of a model by the user's function."""

    model: nn.Module
    inputs: Any
    """Its arguments, as (args, kwargs)."""
    output: Any
    """A nest of detached tensors."""


class OutputRecorder:
    """Record the outputs of models while they are called, not those of models inside of them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self.calls: list[RecordedCall] = []
        self._depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls inside of the block."""
        self.calls, self._depth = [], 0
        handles = [m.register_forward_pre_hook(self._enter) for m in self._models]
        handles += [
            m.register_forward_hook(self._leave, with_kwargs=True, always_call=False)
            for m in self._models
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, _module: nn.Module, _inputs: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            kept = None
            if not in_function_transform():
                with suppress(CannotTry):
                    kept = map_tensors(output, _without_graph)
            self.calls.append(RecordedCall(module, (args, kwargs), kept))


def _without_graph(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        raise CannotTry("an output of a model that is a parameter, and has no samples")
    return tensor.detach()


def try_recorded(
    compute_loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
    models: Sequence[nn.Module],
    calls: Sequence[RecordedCall],
    num_splits: int = 1,
    seed: int = 0,
) -> LossVerdict:
    """Judge a loss by what its models have returned for this batch. Runs no model.

    Args:
        calls: of `OutputRecorder`, from a call of `compute_loss` with these arguments.
        num_splits: 1 to 3 ways to cut the batch in two.
        seed: of the random split.
    """
    if num_samples < 2:
        return _not_tried("a batch of fewer than 2 samples on this rank")
    settings = compute_loss, args, kwargs, num_samples, models, calls, num_splits, seed
    verdict = _try_along(0, *settings)
    if not verdict.objects:
        return verdict
    others = [_try_along(dim, *settings) for dim in _other_dims(calls, num_samples)]
    if any(other.kind in _DIVIDES for other in others):
        return _not_tried("outputs whose samples may lie along either of two dimensions")
    runs = (v for v in others if v.objects and v.kind is not LossKind.FAILS_ON_PARTS)
    return next(runs, verdict) if verdict.kind is LossKind.FAILS_ON_PARTS else verdict


def _other_dims(calls: Sequence[RecordedCall], num_samples: int) -> list[int]:
    """Return the dimensions but 0 along which the samples may lie in all outputs.

    An ensemble of as many models as there are samples may return (models, samples, ...).
    """
    shapes = [t.shape for call in calls for t in plain_nest(call.output) if t.is_floating_point()]
    rank = min((len(shape) for shape in shapes), default=0)
    return [d for d in range(1, rank) if all(shape[d] == num_samples for shape in shapes)]


def _try_along(
    dim: int,
    compute_loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
    models: Sequence[nn.Module],
    calls: Sequence[RecordedCall],
    num_splits: int,
    seed: int,
) -> LossVerdict:
    """Judge as `try_recorded`, with the samples along a dimension of the outputs."""
    verdict = _not_tried("no output of a model")
    for dtype in (torch.float64, None):
        outputs = _OutputsOfRows(calls, models, num_samples, dtype, dim)

        def compute(rows: Tensor, outputs: _OutputsOfRows = outputs) -> Any:
            taken_args, taken_kwargs = take_rows((args, dict(kwargs)), rows, num_samples)
            with outputs.instead_of_models(rows):
                return compute_loss(*taken_args, **taken_kwargs)

        try:
            outputs.check()
            with Untouched(models, compute_loss, with_modules=False) as state:
                tolerance = TOLERANCE_IN_FLOAT64 if dtype else TOLERANCE
                judge = LossJudge(
                    compute, outputs.leaves, state, num_samples, tolerance, num_splits, seed
                )
                verdict = judge.verdict(all_rows=num_samples)
        except CannotTry as why:
            return _not_tried(why.reason)
        if verdict.kind not in (LossKind.CANNOT_JUDGE, LossKind.FAILS_ON_PARTS):
            break
        # A weight of the function's own may refuse to meet float64: once more as they came.
    if verdict.objects:
        verdict = guess_cause(verdict, compute_loss, (args, dict(kwargs)), judge.draws)
    return replace(verdict, outputs_only=True)


class _OutputsOfRows:
    """Recorded outputs that stand for their models.

    Args:
        dtype: that floating outputs are converted to; None leaves them.
        dim: along which their samples lie. It is dimension 0 of `leaves`.
    """

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        models: Sequence[nn.Module],
        num_samples: int,
        dtype: torch.dtype | None,
        dim: int = 0,
    ) -> None:
        self._dim = dim
        self._calls, self._num_samples = calls, num_samples
        self._modules = {m: None for model in models for m in model.modules()}
        self._dtype = dtype
        self._next = 0
        self.leaves: list[Tensor] = []
        self._outputs = [
            None if call.output is None else map_tensors(call.output, self._leaf) for call in calls
        ]

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.detach().transpose(0, self._dim)
        leaf = tensor.to(self._dtype or tensor.dtype, copy=True).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def check(self) -> None:
        """Raise CannotTry if an output is no nest of tensors with the samples in dimension 0."""
        if not self._calls:
            raise CannotTry("models that are not called as a whole")
        for output in self._outputs:
            if output is None:
                raise CannotTry("an output of a model that is no nest of tensors")
            for tensor in tensors_in(plain_nest(output)):
                if type(tensor) is not Tensor:
                    raise CannotTry(f"an output of a model that is a {type(tensor).__name__}")
                if tensor.is_floating_point() and tensor.shape[:1] != (self._num_samples,):
                    raise CannotTry(f"an output of shape {tuple(tensor.shape)}")

    @contextmanager
    def instead_of_models(self, rows: Tensor) -> Iterator[None]:
        """Let calls of the models return these rows of what they have returned."""
        self._next = 0
        before = []
        try:
            for module in self._modules:
                answer = _Answer(self, module, rows)
                before.append((module, replace_call(module, answer)))
            yield
            if self._next != len(self._calls):
                raise CannotTry("another number of calls of the models on fewer samples")
        finally:
            for module, call in before:
                replace_call(module, call)

    def answer(self, module: nn.Module, inputs: Any, rows: Tensor) -> Any:
        """Return rows of the next recorded output.

        Raises: CannotTry: another call was recorded here.
        """
        if self._next >= len(self._calls) or self._calls[self._next].model is not module:
            raise CannotTry("calls of models, or of modules inside of them, in another order")
        recorded = self._calls[self._next].inputs
        if not _same_rows(recorded, inputs, rows, self._num_samples):
            raise CannotTry("models whose inputs are not rows of those of the whole batch")
        self._next += 1
        return map_tensors(
            self._outputs[self._next - 1],
            lambda tensor: (
                self._along(tensor[rows.to(tensor.device)])
                if tensor.shape[:1] == (self._num_samples,)
                else tensor
            ),
        )

    def _along(self, taken: Tensor) -> Tensor:
        return taken.transpose(0, self._dim) if taken.is_floating_point() else taken


class _Answer:
    """A call of a module while recorded outputs stand for it."""

    def __init__(self, outputs: _OutputsOfRows, module: nn.Module, rows: Tensor) -> None:
        self._outputs, self._module, self._rows = outputs, module, rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs.answer(self._module, (args, kwargs), self._rows)


def _same_rows(recorded: Any, inputs: Any, rows: Tensor, num_samples: int) -> bool:
    """Return False if a floating input of a part is not the same rows of the recorded one."""
    whole = [*tensors_in(recorded)]
    part = [*tensors_in(inputs)]
    if len(whole) != len(part):
        return False
    return all(
        old.shape[:1] != (num_samples,)
        or isinstance(old, DTensor)
        or _close(old[rows.to(old.device)], new)
        for old, new in zip(whole, part, strict=True)
    )


def _close(old: Tensor, new: Tensor) -> bool:
    if old.shape != new.shape:
        return False
    return torch.allclose(old.double(), new.double(), rtol=1e-3, atol=1e-6, equal_nan=True)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a nest that `map_nest` knows with its tensors mapped."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return map_nest(value, lambda item: map_tensors(item, function))


def plain_nest(value: Any) -> Any:
    """Return the tensors of any nest that `map_nest` knows, as a list."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def _not_tried(reason: str) -> LossVerdict:
    return LossVerdict(LossKind.NOT_TRIED, reason=reason, outputs_only=True)
