"""A trial of all stages, one after the other on each rank, against one whole run.

      whole run     function ── backward ──────────────────> loss, gradients ─┐
                                                                              ├─ equal, or refused
      stages        stage 0 ─> stage 1 ─> stage 2 ── backward ─> loss, gradients ─┘

It finds what leaves a block as a number or by an attribute, which no tensor shows. Both runs draw
the same random numbers. Two numbers of each gradient are compared, its norm and its product with a
fixed vector, so that two full sets of gradients need not be in memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.seeds import preserve_rng_state
from shoal.platform.tensors import accumulation_dtype, dense
from shoal.platform.torch_private.tensor_state import accumulation_hooks, gradient_hooks
from shoal.strategies.module_snapshot import ModelSnapshot
from shoal.strategies.pipeline.absent import WalkRefusal, absence_explained
from shoal.strategies.pipeline.division import DividedModel, shape_key
from shoal.strategies.pipeline.stage_map import StageMap

SEED = 0
PERIOD = 1024
"""Length of the fixed vector, which is repeated. To draw one as long as a large weight would take
longer than the sample itself.
"""
TOLERANCE = 1e-3
"""Relative to a gradient's norm, or to the loss. Another way through the code gives quite other
numbers.
"""
GradientSums = dict[str, tuple[float, float]]
"""Parameter name -> norm of its gradient, product with the fixed vector."""


class _TrialRun(NamedTuple):
    loss: float
    gradients: GradientSums
    mutated_buffers: set[int]


def try_stages(
    divided: DividedModel,
    function: Callable[[], Any],
    loss_of: Callable[[Any], Tensor],
    sample: Any,
) -> set[int]:
    """Compare all stages in turn with a whole run. The model stays as it was.

    Args:
        loss_of: the function's result -> a scalar to differentiate.
        sample: the function's arguments.

    Returns: ids of the buffers that the function writes into.

    Raises: WalkRefusal: loss or gradients differ, or the function cannot be divided.
    """
    names = divided.stage_map
    one_stage = StageMap(names.names, dict.fromkeys(names.stages, 0), 0)
    whole = DividedModel(divided.units, divided.forms, one_stage, {})
    key = shape_key(divided.units.model, sample)
    with torch.enable_grad(), preserve_rng_state([divided.units.device]):
        expected = _forward_backward(whole, function, loss_of, key)
        with absence_explained():
            found = _forward_backward(divided, function, loss_of, key)
    _compare(expected, found)
    return expected.mutated_buffers


def _forward_backward(
    divided: DividedModel, function: Callable[[], Any], loss_of: Callable[[Any], Tensor], key: Any
) -> _TrialRun:
    model = divided.units.model
    saved = ModelSnapshot(model)
    try:
        with divided.units.watched(), _without_hooks(model):
            crossing = divided.crossing(function, key, SEED)
            values: tuple[Tensor, ...] = ()
            result: Any = None
            for stage in range(divided.num_stages):
                values, result = divided.run_stage(stage, function, crossing, values, SEED)
            loss = loss_of(result)
            if loss.requires_grad:
                loss.backward()
        named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        sums = {name: _summarize(gradient) for name, gradient in named if gradient is not None}
        return _TrialRun(float(loss.detach()), sums, saved.mutated())
    finally:
        saved.restore()


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Let no hook on a parameter run in this context: the script would see passes of a trial."""
    tables = [t for p in model.parameters() for t in (gradient_hooks(p), accumulation_hooks(p))]
    saved = [(table, dict(table)) for table in tables if table]
    for table, _ in saved:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in saved:
            table.update(hooks)


def _summarize(gradient: Tensor) -> tuple[float, float]:
    """Return the norm of a gradient, and its product with the fixed vector."""
    values = dense(gradient)
    real = torch.view_as_real(values) if values.is_complex() else values
    flat = real.flatten().to(accumulation_dtype(real.dtype))
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(PERIOD, generator=generator).to(flat)
    rest = flat.numel() % PERIOD
    full_periods = flat[: flat.numel() - rest].view(-1, PERIOD)
    end = flat[flat.numel() - rest :]
    return float(flat.norm()), float((full_periods @ weights).sum() + end @ weights[:rest])


def _compare(expected: _TrialRun, found: _TrialRun) -> None:
    if not _is_close(expected.loss, found.loss, abs(expected.loss), 1e-6):
        _refuse(f"the loss is {found.loss:.4g}, and {expected.loss:.4g} in one piece")
    # A gradient that is tiny beside the largest one consists of rounding errors.
    floor = 1e-6 * max((norm for norm, _ in expected.gradients.values()), default=0.0)
    for name in sorted(expected.gradients.keys() | found.gradients.keys()):
        one, other = expected.gradients.get(name), found.gradients.get(name)
        if one is None or other is None:
            here, there = ("none", "one") if other is None else ("one", "none")
            _refuse(f"{name} has {here} gradient, and {there} in one piece")
        elif not all(_is_close(a, b, one[0], floor) for a, b in zip(one, other, strict=True)):
            _refuse(
                f"the gradient of {name} is {other[0]:.4g}, and {one[0]:.4g} in one piece "
                "(its 2-norm)"
            )


def _refuse(difference: str) -> None:
    raise WalkRefusal(
        f"pipeline: in stages, {difference}: a block passes something on otherwise than by what it "
        "returns (a number, an attribute, a counter), or an autograd.Function is called between "
        "blocks. Return it from the block; call the function inside a block that has parameters."
    )


def _is_close(expected: float, actual: float, scale: float, floor: float) -> bool:
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return str(expected) == str(actual)
    return abs(expected - actual) <= TOLERANCE * scale + floor


def has_gradient_hooks(model: nn.Module, registers_hooks: bool) -> bool:
    """Return whether hooks act on gradients, which halves of a backward pass would call twice."""
    from shoal.platform.torch_private.module_state import has_backward_hooks

    return registers_hooks or any(has_backward_hooks(module) for module in model.modules())
