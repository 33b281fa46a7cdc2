"""Whether a graph does what its model does: both are run on a sample, in training and in
evaluation.

      model ── forward ── backward ──> outputs, gradients of all parameters ─┐
                                                                             ├─ alike, or the model is refused
      graph ── forward ── backward ──> outputs, gradients of all parameters ─┘

Both draw the same random numbers. Of a gradient two numbers are compared, its norm and its product
with a fixed vector, so that no two whole sets of gradients are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import StrategyRefused
from shoal.platform.tensors import accumulation_dtype, dense
from shoal.platform.torch_private.module_state import has_backward_hooks
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.strategies.pipeline.buffer_updates import Buffers
from shoal.strategies.pipeline.train_mode import in_mode, in_training

SEED = 0
PERIOD = 1024
"""Of the fixed vector, which is repeated: one as long as a large weight would take longer than
the sample.
"""
Gradients = dict[str, tuple[float, float]]


class CheckedRun(NamedTuple):
    """What a model was seen to do in a forward pass in training.

    Attributes:
        written: ids of the buffers that it writes into.
        hooks: it registers hooks on tensors, or its modules have hooks on gradients.
    """

    mutated_buffers: set[int]
    hooks: bool


class _Recording(NamedTuple):
    outputs: list[Any]
    gradients: Gradients


def compare(
    model: nn.Module,
    training: fx.Graph,
    evaluating: fx.Graph,
    sample: tuple[Any, ...],
    buffers: Buffers,
) -> CheckedRun:
    """Run both, in training with the modes that modules have where the model is in training.

    Raises: StrategyRefused: they differ; the graph fails.
    """
    with in_mode(model, False), _disable_mha_fastpath(), torch.no_grad():
        expected = _forward(model.forward, sample)
        buffers.restore()
        _refuse_other_outputs(model, expected, _forward(_run(model, evaluating), sample))
        buffers.restore()
    with in_training(model), torch.enable_grad():
        with _RecordGradients() as listening:
            whole = _both_passes(model, model.forward, sample)
        written = buffers.mutated()
        buffers.restore()
        try:
            pieces = _both_passes(model, _run(model, training), sample)
        except RuntimeError as error:
            raise StrategyRefused(
                f"pipeline: traced, {type(model).__name__} fails where it does not fail itself: "
                f"{str(error).splitlines()[0]}. Keep what a module computes for others in what it "
                "returns."
            ) from error
    _refuse_other_outputs(model, whole.outputs, pieces.outputs)
    _refuse_other_gradients(model, whole.gradients, pieces.gradients)
    hooks = any(has_backward_hooks(module) for module in model.modules())
    return CheckedRun(written, hooks or listening.heard)


class _RecordGradients(TorchFunctionMode):
    """Hears whether hooks are registered on tensors."""

    heard = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard = self.heard or func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    return fx.Interpreter(model, graph=graph).run


def _forward(function: Callable[..., Any], sample: tuple[Any, ...]) -> list[Any]:
    own = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, sample)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return tree_leaves(function(*own))


def _both_passes(
    model: nn.Module, function: Callable[..., Any], sample: tuple[Any, ...]
) -> _Recording:
    """`.grad` is afterwards as it was."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        outputs = _forward(function, sample)
        roots = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
        draw = torch.Generator().manual_seed(SEED)
        if roots:
            weights = [torch.randn(root.shape, generator=draw).to(root) for root in roots]
            torch.autograd.backward(roots, weights)
        named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        return _Recording(
            _without_graph(outputs),
            {name: _describe(grad) for name, grad in named if grad is not None},
        )
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _without_graph(outputs: Sequence[Any]) -> list[Any]:
    return [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in outputs
    ]


def _describe(gradient: Tensor) -> tuple[float, float]:
    known = dense(gradient)
    wide = torch.view_as_real(known) if known.is_complex() else known
    flat = wide.flatten().to(accumulation_dtype(wide.dtype))
    draw = torch.Generator().manual_seed(SEED)
    weights = torch.randn(PERIOD, generator=draw).to(flat)
    rest = flat.numel() % PERIOD
    rows, end = flat[: flat.numel() - rest].view(-1, PERIOD), flat[flat.numel() - rest :]
    return float(flat.norm()), float((rows @ weights).sum() + end @ weights[:rest])


def _refuse_other_outputs(model: nn.Module, expected: list[Any], given: list[Any]) -> None:
    if len(expected) != len(given) or not all(
        _equal_enough(*pair) for pair in zip(expected, given, strict=True)
    ):
        raise StrategyRefused(
            f"pipeline: traced, {type(model).__name__} gives another output than it does itself: "
            "its code asks what "
            "kind of input it has, or reads what a module has noted while it ran; a tracer finds "
            "other things there. "
            "Move that into a module of its own, and have modules return what others need."
        )


def _refuse_other_gradients(model: nn.Module, expected: Gradients, given: Gradients) -> None:
    floor = 1e-6 * max((norm for norm, _ in expected.values()), default=0.0)
    for name in sorted(expected.keys() | given.keys()):
        has, gets = name in expected, name in given
        if has == gets and all(
            _allclose(expected[name][i], given[name][i], expected[name][0], floor) for i in (0, 1)
        ):
            continue
        how = (
            "another gradient than"
            if has and gets
            else "no gradient, unlike"
            if has
            else "a gradient, unlike"
        )
        raise StrategyRefused(
            f"pipeline: traced, {type(model).__name__} gives {name} {how} the model itself: a part "
            "of its code "
            "changes gradients where a tracer does not see it. Move that part into a module of its "
            "own inside a "
            "Sequential or ModuleList; what is not to be trained, freeze with "
            "requires_grad_(False)."
        )


def _allclose(expected: float, given: float, size: float, floor: float) -> bool:
    if not (math.isfinite(expected) and math.isfinite(given)):
        return str(expected) == str(given)
    return abs(expected - given) <= 1e-3 * size + floor


def _equal_enough(expected: Any, given: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(given, Tensor):
        return type(expected) is type(given) and bool(expected == given)
    if expected.shape != given.shape or expected.requires_grad != given.requires_grad:
        return False
    expected, given = expected.detach(), given.detach()
    same = (expected == given) | (expected.isnan() & given.isnan())
    if not expected.is_floating_point():
        return bool(same.all())
    # Inference may take kernels of its own; another path through the code is another number
    # altogether.
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max() if expected.numel() else torch.zeros(())
    return bool((same | ((expected - given).abs() <= 1e-3 * size + 1e-6)).all())


@contextmanager
def _disable_mha_fastpath() -> Iterator[None]:
    """torch's fast path of transformers writes zeros where padding is, which the same layers do
    not in training.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
