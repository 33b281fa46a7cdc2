"""A check that a trace does the same as its model: both run on a sample, in training and in
evaluation.

      model ── forward ── backward ──> outputs, gradients of all parameters ─┐
                                                                             ├─ equal, or refused
      graph ── forward ── backward ──> outputs, gradients of all parameters ─┘

Both runs draw the same random numbers. Two numbers of each gradient are compared, its norm and its
product with a fixed vector, so that two full sets of gradients need not be in memory at once.
"""

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
from shoal.strategies.pipeline.trial_state import SavedBuffers, in_mode, in_training

SEED = 0
PERIOD = 1024
"""Length of the fixed vector, which is repeated. To draw one as long as a large weight would take
longer than the sample itself.
"""
TOLERANCE = 1e-3
"""Relative to a gradient's norm, or to the largest output: inference may use other
kernels. Another path through the code gives quite other numbers."""
GradientSums = dict[str, tuple[float, float]]
"""Parameter name -> norm of its gradient, product with the fixed vector."""


class CheckedRun(NamedTuple):
    """Facts about a model's forward pass in training.

    Attributes:
        mutated_buffers: ids of the buffers that it writes into.
        hooks: it registers hooks on tensors, or its modules have hooks on gradients.
    """

    mutated_buffers: set[int]
    hooks: bool


class _TrialRun(NamedTuple):
    """The results of one forward and backward pass."""

    outputs: list[Any]
    gradients: GradientSums


def compare(
    model: nn.Module,
    training: fx.Graph,
    evaluating: fx.Graph,
    sample: tuple[Any, ...],
    buffers: SavedBuffers,
) -> CheckedRun:
    """Run the model and its graphs on a sample. Buffers and gradients stay as they were.

    Raises: StrategyRefused: outputs or gradients differ, or the graph fails.
    """
    with in_mode(model, False), _disable_mha_fastpath(), torch.no_grad():
        expected = _forward(model.forward, sample)
        buffers.restore()
        _check_outputs(model, expected, _forward(_interpret(model, evaluating), sample))
        buffers.restore()
    with in_training(model), torch.enable_grad():
        with _HookDetector() as detector:
            of_model = _forward_backward(model, model.forward, sample)
        mutated = buffers.mutated()
        buffers.restore()
        try:
            of_graph = _forward_backward(model, _interpret(model, training), sample)
        except RuntimeError as error:
            raise StrategyRefused(
                f"pipeline: traced, {type(model).__name__} fails where it does not fail itself: "
                f"{str(error).splitlines()[0]}. Keep what a module computes for others in what it "
                "returns."
            ) from error
    _check_outputs(model, of_model.outputs, of_graph.outputs)
    _check_gradients(model, of_model.gradients, of_graph.gradients)
    hooks = any(has_backward_hooks(module) for module in model.modules())
    return CheckedRun(mutated, hooks or detector.detected)


class _HookDetector(TorchFunctionMode):
    """Detects whether code registers hooks on tensors."""

    detected = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.detected = self.detected or func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _interpret(model: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    return fx.Interpreter(model, graph=graph).run


def _forward(function: Callable[..., Any], sample: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the output. The function gets copies, for it may write into them."""
    inputs = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, sample)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return tree_leaves(function(*inputs))


def _forward_backward(
    model: nn.Module, function: Callable[..., Any], sample: tuple[Any, ...]
) -> _TrialRun:
    """Run both passes; `.grad` of all parameters is afterwards as it was."""
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        outputs = _forward(function, sample)
        _backward(outputs)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        sums = {name: _summarize(grad) for name, grad in gradients.items() if grad is not None}
        return _TrialRun(_detached(outputs), sums)
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient


def _backward(outputs: Sequence[Any]) -> None:
    """Differentiate a random weighted sum of all outputs."""
    roots = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(SEED)
    weights = [torch.randn(root.shape, generator=generator).to(root) for root in roots]
    torch.autograd.backward(roots, weights)


def _detached(outputs: Sequence[Any]) -> list[Any]:
    """Free the graph, but keep the `requires_grad` of each output for the comparison."""
    return [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in outputs
    ]


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


def _check_outputs(model: nn.Module, expected: list[Any], actual: list[Any]) -> None:
    if len(expected) != len(actual) or not all(
        _allclose(*pair) for pair in zip(expected, actual, strict=True)
    ):
        raise StrategyRefused(
            f"pipeline: traced, {type(model).__name__} gives another output than it does itself: "
            "its code asks what kind of input it has, or reads what a module has noted while it "
            "ran; a tracer finds other things there. Move that into a module of its own, and have "
            "modules return what others need."
        )


def _check_gradients(model: nn.Module, expected: GradientSums, actual: GradientSums) -> None:
    # A gradient that is tiny beside the largest one consists of rounding errors.
    floor = 1e-6 * max((norm for norm, _ in expected.values()), default=0.0)
    for name in sorted(expected.keys() | actual.keys()):
        difference = _gradient_difference(expected.get(name), actual.get(name), floor)
        if difference is not None:
            raise StrategyRefused(
                f"pipeline: traced, {type(model).__name__} gives {name} {difference} the model "
                "itself: a part of its code changes gradients where a tracer does not see it. Move "
                "that part into a module of its own inside a Sequential or ModuleList; what is not "
                "to be trained, freeze with requires_grad_(False)."
            )


def _gradient_difference(
    expected: tuple[float, float] | None, actual: tuple[float, float] | None, floor: float
) -> str | None:
    """Describe how a gradient differs; None: it does not."""
    if expected is None:
        return "a gradient, unlike"
    if actual is None:
        return "no gradient, unlike"
    norm = expected[0]
    pairs = zip(expected, actual, strict=True)
    if all(_sums_are_close(one, other, norm, floor) for one, other in pairs):
        return None
    return "another gradient than"


def _sums_are_close(expected: float, actual: float, norm: float, floor: float) -> bool:
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return str(expected) == str(actual)
    return abs(expected - actual) <= TOLERANCE * norm + floor


def _allclose(expected: Any, actual: Any) -> bool:
    """Return whether two outputs are equal: exactly, or floating-point ones within TOLERANCE."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return type(expected) is type(actual) and bool(expected == actual)
    if expected.shape != actual.shape or expected.requires_grad != actual.requires_grad:
        return False
    expected = expected.detach()
    actual = actual.detach()
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    if not expected.is_floating_point():
        return bool(same.all())
    finite = expected.nan_to_num(0.0, 0.0, 0.0)
    largest = finite.abs().max() if expected.numel() else torch.zeros(())
    return bool((same | ((expected - actual).abs() <= TOLERANCE * largest + 1e-6)).all())


@contextmanager
def _disable_mha_fastpath() -> Iterator[None]:
    """Disable the inference fast path of torch's transformers: it writes zeros where padding is,
    and the same layers do not in training.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
