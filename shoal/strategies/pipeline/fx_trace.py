"""The trace of a model: its forward pass as a graph that can be cut between steps.

We use torch.fx with four additions.

[1] *Wrap units are one node.* A block of a container (`strategies/wrap_units.py`) is called as a
    module, so hooks on it still work. The tracer looks into blocks only if there are too few places
    to cut otherwise.
[2] *Modules that cannot be traced are one node too.* The tracer cannot follow code that reads
    values, that switches autograd or autocast, or that runs a `torch.autograd.Function`. It must
    not follow a module with buffers or hooks: it would run their effects once, while tracing.
[3] *Training and evaluation are traced separately*: `self.training` is a constant in a trace.
[4] *Constants must stay constant*: `constants.py` checks that in every step.

A tracer follows one path through the code. So the graph is run on a sample and compared with the
model itself: outputs, and gradients of all parameters (`trace_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import version
from shoal.strategies.pipeline.constants import Constants, has_hooks
from shoal.strategies.pipeline.trace_check import CheckedRun, compare
from shoal.strategies.pipeline.traceable_modules import TRACEABLE_FORWARDS
from shoal.strategies.pipeline.trial_state import SavedBuffers, in_mode

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """The trace of a model.

    Attributes:
        training, evaluating: graphs with the same nodes; only constants in them may differ.
        num_inputs: positional inputs; all others have their default values.
        constants: the assumptions of both graphs.
        checked: facts about the model's run on a sample; None without a sample.
        added: attributes that the tracer has added to the model: tensors that the forward function
            creates, such as `torch.ones(3)`.
    """

    training: fx.Graph
    evaluating: fx.Graph
    num_inputs: int
    constants: Constants
    checked: CheckedRun | None
    added: tuple[str, ...]


class _SingleTrace(NamedTuple):
    """The graph of one path through the code.

    Attributes:
        created: name -> tensor that the forward function creates.
        inlined: names of the modules that the tracer looked into.
    """

    graph: fx.Graph
    created: dict[str, Any]
    inlined: Set[str]

    @property
    def signatures(self) -> list[tuple[Any, ...]]:
        """Return the nodes without their constants."""
        return [
            (node.op, str(node.target), [source.name for source in node.all_input_nodes])
            for node in self.graph.nodes
        ]


class _TraceSet(NamedTuple):
    """Traces of one model in several modes.

    Attributes:
        all_training: all modules in training mode.
        all_evaluating: all modules in evaluation mode.
        own_modes: each module in the mode that it has in a training step.
    """

    all_training: _SingleTrace
    all_evaluating: _SingleTrace
    own_modes: _SingleTrace


def trace_model(
    model: nn.Module, num_inputs: int, leaves: Set[str], sample: Inputs | None = None
) -> Traced:
    """Trace a model. The model stays as it was, except for `Traced.added`.

    Modules keep their modes: a module in evaluation mode, in a model in training mode, stays in
    evaluation mode.

    Args:
        leaves: names of modules that are one node.
        sample: inputs with which the graph is checked, forward and backward.

    Raises: StrategyRefused: the model's own forward function cannot be traced, or the graph does
        something else than the model.
    """
    buffers = SavedBuffers(model)
    try:
        return _trace_and_check(model, num_inputs, set(leaves), sample, buffers)
    finally:
        buffers.restore()


def free_trace(model: nn.Module, added: Iterable[str]) -> None:
    """Remove the attributes that the tracer has added to a model."""
    for name in added:
        vars(model).pop(name, None)


def _trace_and_check(
    model: nn.Module,
    num_inputs: int,
    leaves: set[str],
    sample: Inputs | None,
    buffers: SavedBuffers,
) -> Traced:
    traces = _trace_modes(model, num_inputs, leaves)
    training = traces.own_modes
    evaluating = traces.all_evaluating
    same_created = training.created.keys() == evaluating.created.keys() and all(
        _equal(training.created[name], evaluating.created[name]) for name in training.created
    )
    if training.signatures != evaluating.signatures or not same_created:
        raise StrategyRefused(
            "pipeline: the model's forward function takes another way in training than in "
            "evaluation, so its stages are not the same. Move what differs into a module of its "
            "own inside a Sequential or ModuleList."
        )
    vars(model).update(training.created)
    checked = None
    if sample is not None:
        try:
            checked = compare(model, training.graph, evaluating.graph, sample, buffers)
        except BaseException:
            free_trace(model, training.created)
            raise
    constants = Constants(model, training.inlined, _mode_readers(traces))
    return Traced(
        training.graph, evaluating.graph, num_inputs, constants, checked, tuple(training.created)
    )


def _trace_modes(model: nn.Module, num_inputs: int, leaves: set[str]) -> _TraceSet:
    """Trace the model in all modes, with the same leaves in all of them."""
    mixed = model.training and not all(module.training for module in model.modules())
    while True:
        num_leaves = len(leaves)
        with in_mode(model, True):
            training = _trace(model, num_inputs, leaves)
        with in_mode(model, False):
            evaluating = _trace(model, num_inputs, leaves)
        own_modes = _trace(model, num_inputs, leaves) if mixed else training
        # A module that could not be traced in one mode must be a leaf in all of them.
        if len(leaves) == num_leaves:
            return _TraceSet(training, evaluating, own_modes)


def _trace(model: nn.Module, num_inputs: int, leaves: set[str]) -> _SingleTrace:
    """Trace the model in its present modes. Modules that cannot be traced are added to `leaves`."""
    while True:
        tracer = _Tracer(num_inputs, leaves)
        buffer_versions = _buffer_versions(model)
        attributes = set(vars(model))
        try:
            graph = tracer.trace(model)
            if buffer_versions != _buffer_versions(model):
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward writes into buffers of its own, "
                    "which cannot be traced. Move what it does with them into a module of its own."
                )
            created = {name: vars(model)[name] for name in _new_constants(model, attributes)}
            return _SingleTrace(graph, created, tracer.inlined)
        except StrategyRefused:
            raise
        except Exception as error:  # any error that the model's code raises on a proxy
            if not tracer.failed_in:
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward cannot be traced, so there is no "
                    f"place to cut it: {_first_line(error)}. Keep what depends on values inside "
                    "modules that the forward function calls."
                ) from error
            leaves.add(tracer.failed_in)
        finally:
            free_trace(model, _new_constants(model, attributes))


class _Tracer(fx.Tracer):
    """Traces one path.

    Attributes:
        failed_in: the innermost module whose code raised an error; "" for the model itself.
        inlined: names of the modules that were looked into.
    """

    def __init__(self, num_inputs: int, leaves: Set[str]) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.leaves = leaves
        self.failed_in = ""
        self.inlined = {""}
        self._flags = _mode_flags()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Hooks must be called with the module. A module with buffers may write into them, and the
        # tracer would do that once, not in every step.
        if has_hooks(m) or any(True for _ in m.buffers(recurse=False)):
            return True
        if module_qualified_name in self.leaves:
            return True
        return type(m) not in TRACEABLE_FORWARDS and super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.path_of_module(m)
        # Before the call, or else an error would be blamed on this module.
        self._check_flags()
        if not self.is_leaf_module(m, name):
            self.inlined.add(name)
            rewritten = TRACEABLE_FORWARDS.get(type(m))
            if rewritten is not None:
                forward = lambda *a, **k: rewritten(m, *a, **k)  # noqa: E731
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind in ("call_function", "call_method"):
            self._check_flags()
        return super().create_node(kind, *args, **kwargs)

    def _check_flags(self) -> None:
        """Raise RuntimeError inside `torch.no_grad` and its like: a graph has no `with`, so the
        block would run as if it stood outside.
        """
        if _mode_flags() != self._flags:
            raise RuntimeError(
                "a part of it runs under torch.no_grad, under torch.autocast or in a "
                "torch.autograd.Function"
            )

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Create a proxy for each input that will be given. A proxy for an optional input would
        look like an input that is not None.
        """
        inputs = [
            self.create_proxy("placeholder", f"input_{index}", (), {})
            for index in range(self.num_inputs)
        ]
        return TRACEABLE_FORWARDS.get(type(self.root), root_fn), [self.root, *inputs]


def _mode_readers(traces: _TraceSet) -> set[str]:
    """Return the names of the inlined modules whose code reads `self.training`.

    Their nodes have other constants in training than in evaluation.
    """
    one, other = traces.all_training, traces.all_evaluating
    if one.signatures != other.signatures:
        # The nodes cannot be paired, so any module may be a reader.
        return set(one.inlined)
    readers: set[str] = set()
    for node, counterpart in zip(one.graph.nodes, other.graph.nodes, strict=True):
        if repr((node.args, node.kwargs)) != repr((counterpart.args, counterpart.kwargs)):
            stack = node.meta.get("nn_module_stack", {})
            readers.update(name for name, _ in stack.values())
    return readers & one.inlined


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _new_constants(model: nn.Module, old: Set[str]) -> list[str]:
    """Return the attributes that fx has added: it calls them `_tensor_constant0` and so on."""
    return [name for name in vars(model) if name not in old and "_constant" in name]


def _buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), version(buffer)) for buffer in model.buffers()]


def _mode_flags() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
