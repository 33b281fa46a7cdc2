"""The forward pass of a model as a graph, so that it can be cut between any two steps: torch.fx,
with four additions.

[1] *Units stay whole.* Blocks of a container (`strategies/units.py`) are one node each. They are
    called as modules, so what hooks into them goes on working; they are looked into only where that
    leaves too few places to cut.
[2] *What cannot be traced stays whole too*: a module whose own Python code looks at values,
    switches autograd or autocast, is a `torch.autograd.Function` in disguise, has buffers or has
    hooks is one node.
[3] *Training and evaluation are traced apart*, for `self.training` is a constant to a tracer.
[4] *What was constant must stay so*: `constants.py` says when it did not.

A tracer follows one path through the code. On a sample, the graph is run and compared with the
model itself
(`compare.py`): what both give, and the gradients of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import version
from shoal.strategies.pipeline.buffer_updates import Buffers
from shoal.strategies.pipeline.constants import Constants, has_hooks
from shoal.strategies.pipeline.trace_check import CheckedRun, compare
from shoal.strategies.pipeline.traceable_modules import REWRITTEN
from shoal.strategies.pipeline.train_mode import in_mode

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A model's forward pass.

    Attributes: training, evaluating: graphs of the same nodes; constants may differ. num_inputs:
        positional ones; others have their default values. constants: what both take for granted.
        tried: what the model was seen to do on a sample; None without one. added: attributes that
        the model has now, tensors that its forward function makes out of nothing.
    """

    training: fx.Graph
    evaluating: fx.Graph
    num_inputs: int
    constants: Constants
    checked: CheckedRun | None
    added: tuple[str, ...]


class _TrainOrEvalGraph(NamedTuple):
    """One path through the code, with the tensors made on it and the names of the modules it
    was looked for in.
    """

    graph: fx.Graph
    made: dict[str, Any]
    inside: Set[str]

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        return [_shape(node) for node in self.graph.nodes]


def trace_model(
    model: nn.Module, num_inputs: int, whole: Set[str], sample: Inputs | None = None
) -> Traced:
    """The graphs of `model`, which is left as it was but for `Traced.added`.

    Modules keep their modes in training: a part that is in evaluation mode while the model is not
    stays in it.

    Args:
        whole: names of modules that are not looked into.
        sample: inputs that the graph is tried on, forward and backward.

    Raises: StrategyRefused: the model's own forward function cannot be traced, or does other things
    than the graph."""
    buffers = Buffers(model)
    try:
        return _traced(model, num_inputs, set(whole), sample, buffers)
    finally:
        buffers.restore()


def _traced(
    model: nn.Module, num_inputs: int, whole: set[str], sample: Inputs | None, buffers: Buffers
) -> Traced:
    always, never, own = _train_and_eval_graphs(model, num_inputs, whole)
    alike = own.made.keys() == never.made.keys() and all(
        _equal(own.made[name], never.made[name]) for name in own.made
    )
    if own.shapes != never.shapes or not alike:
        raise StrategyRefused(
            "pipeline: the model's forward function takes another way in training than in "
            "evaluation, so its stages "
            "are not the same. Move what differs into a module of its own inside a Sequential or "
            "ModuleList."
        )
    vars(model).update(own.made)
    tried = None
    if sample is not None:
        try:
            tried = compare(model, own.graph, never.graph, sample, buffers)
        except BaseException:
            free_trace(model, own.made)
            raise
    asking = _differing(always, never) if always.shapes == never.shapes else always.inside
    constants = Constants(model, own.inside, asking)
    return Traced(own.graph, never.graph, num_inputs, constants, tried, tuple(own.made))


def free_trace(model: nn.Module, added: Iterable[str]) -> None:
    """Take away what tracing has added to a model."""
    for name in added:
        vars(model).pop(name, None)


def _train_and_eval_graphs(
    model: nn.Module, num_inputs: int, whole: set[str]
) -> tuple[_TrainOrEvalGraph, _TrainOrEvalGraph, _TrainOrEvalGraph]:
    """In training, in evaluation, and with the modes that modules have where the model is in
    training.
    """
    mixed = model.training and not all(module.training for module in model.modules())
    while True:
        known = len(whole)
        with in_mode(model, True):
            always = _way(model, num_inputs, whole)
        with in_mode(model, False):
            never = _way(model, num_inputs, whole)
        own = _way(model, num_inputs, whole) if mixed else always
        if (
            len(whole) == known
        ):  # else a module was found late that has to stay whole in all of them
            return always, never, own


def _way(model: nn.Module, num_inputs: int, whole: set[str]) -> _TrainOrEvalGraph:
    while True:
        tracer = _Tracer(num_inputs, whole)
        before = [(id(buffer), version(buffer)) for buffer in model.buffers()]
        had = set(vars(model))
        try:
            graph = tracer.trace(model)
            if before != [(id(buffer), version(buffer)) for buffer in model.buffers()]:
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward writes into buffers of its own, "
                    "which cannot be traced. "
                    "Move what it does with them into a module of its own."
                )
            return _TrainOrEvalGraph(
                graph, {name: vars(model)[name] for name in _new(model, had)}, tracer.inside
            )
        except StrategyRefused:
            raise
        except Exception as error:  # whatever the model's code raises on a stand-in for a tensor
            if not tracer.failed_in:
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward cannot be traced, so there is no "
                    "place to cut it: "
                    f"{_first_line(error)}. Keep what depends on values inside modules that the "
                    "forward function calls."
                ) from error
            whole.add(tracer.failed_in)
        finally:
            free_trace(model, _new(model, had))


class _Tracer(fx.Tracer):
    def __init__(self, num_inputs: int, whole: Set[str]) -> None:
        super().__init__()
        self.num_inputs, self.whole, self.failed_in = num_inputs, whole, ""
        self.inside = {""}
        self.switches = _mode_flags()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Hooks are called with a module. What has buffers may write into them, and a tracer would
        # do it once for all.
        keeps = (
            has_hooks(m)
            or any(True for _ in m.buffers(recurse=False))
            or module_qualified_name in self.whole
        )
        return keeps or (
            type(m) not in REWRITTEN and super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.path_of_module(m)
        self._refuse_switched()  # before it counts as this module's fault
        if not self.is_leaf_module(m, name):
            self.inside.add(name)
            rewritten = REWRITTEN.get(type(m))
            if rewritten is not None:
                forward = lambda *a, **k: rewritten(m, *a, **k)  # noqa: E731
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind in ("call_function", "call_method"):
            self._refuse_switched()
        return super().create_node(kind, *args, **kwargs)

    def _refuse_switched(self) -> None:
        """A graph has no `with`: what stood inside one would be computed as if it did not."""
        if _mode_flags() != self.switches:
            raise RuntimeError(
                "a part of it runs under torch.no_grad, under torch.autocast or in a "
                "torch.autograd.Function"
            )

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """As many inputs as there will be; a stand-in for an optional one would look as if it
        were given.
        """
        inputs = [
            self.create_proxy("placeholder", f"input_{index}", (), {})
            for index in range(self.num_inputs)
        ]
        return REWRITTEN.get(type(self.root), root_fn), [self.root, *inputs]


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return node.op, str(node.target), [value.name for value in node.all_input_nodes]


def _differing(one: _TrainOrEvalGraph, other: _TrainOrEvalGraph) -> set[str]:
    """Names of modules in whose code nodes have other constants."""
    pairs = zip(one.graph.nodes, other.graph.nodes, strict=True)
    nodes = [a for a, b in pairs if repr((a.args, a.kwargs)) != repr((b.args, b.kwargs))]
    return {
        name for node in nodes for name, _ in node.meta.get("nn_module_stack", {}).values()
    } & one.inside


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _new(model: nn.Module, had: Set[str]) -> list[str]:
    return [name for name in vars(model) if name not in had and "_constant" in name]


def _mode_flags() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
