"""The steps of a traced model: their order, their cost, and the values that are live between them.

A *step* is a node of the graph that is computed once. *Place* i is the gap before step i, and the
last place is after the last step. A cut at a place makes a stage begin with that step.

      input ── step 0 ── step 1 ──┬── step 2 ── step 3 ──+── step 4 ── output
                                  └──────────────────────┘
      live across place 2: the value of step 1
      live across place 3: the values of steps 1 and 2; the shortcut is carried along

Three kinds of nodes are no steps, and are never sent:
- model inputs: every rank of a pipeline has the full local batch;
- parameters and buffers: each stage that uses one holds it;
- numbers that follow from inputs alone, such as sizes: each stage computes them again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.strategies.pipeline.trial_state import SavedBuffers

NO_COST_OPS = ("placeholder", "get_attr", "output")
SIZE_METHODS = ("size", "dim", "numel", "__len__", "ndimension")
SIZE_ATTRIBUTES = ("shape", "ndim", "device", "dtype")
REPEATS = 3
"""Runs of each step in a profile; the shortest counts."""


@dataclass(frozen=True)
class StepProfile:
    """Measurements of one step on a sample.

    Attributes:
        is_tensor: the step returns a tensor; nothing else can be sent to another stage.
        size_bytes: of all tensors that it returns.
        time_s: forward and backward.
    """

    is_tensor: bool
    size_bytes: int
    time_s: float


def steps_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the steps of a graph, in order."""
    recomputable = recomputable_nodes(graph)
    return [node for node in graph.nodes if node.op not in NO_COST_OPS and node not in recomputable]


def recomputable_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are numbers that follow from inputs alone: sizes, and
    arithmetic on sizes.
    """
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in NO_COST_OPS or node.op == "call_module":
            continue
        sources = node.all_input_nodes
        reads_size = _is_size_method(node) or _is_size_attribute(node)
        of_inputs = reads_size and all(source.op == "placeholder" for source in sources)
        of_numbers = bool(sources) and all(source in numbers for source in sources)
        if of_inputs or (of_numbers and (reads_size or _is_arithmetic(node))):
            numbers.add(node)
    return numbers


def live_across(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return for each place the earlier steps whose values are used after it.

    Returns: len(steps) + 1 lists.
    """
    steps = steps_of(graph)
    index_of = {step: index for index, step in enumerate(steps)}
    last_use = {step: _last_use(step, index_of, set()) for step in steps}
    return [
        [step for step in steps[:place] if last_use[step] >= place]
        for place in range(len(steps) + 1)
    ]


def cut_points(graph: fx.Graph, profiles: Mapping[fx.Node, StepProfile] | None) -> list[int]:
    """Return the places where the model can be cut: only tensors are live across them.

    Args: profiles: tell what each step returns. None: it is guessed from the graph.
    """
    live = live_across(graph)
    return [
        place
        for place in range(1, len(live) - 1)
        if all(_is_sendable(node, profiles) for node in live[place])
    ]


def profile(
    model: nn.Module, graph: fx.Graph, sample: tuple[Any, ...]
) -> dict[fx.Node, StepProfile]:
    """Run each step forward and backward on a sample, and measure it.

    Buffers and gradients of the model, and the random state, stay as they were.
    """
    buffers = SavedBuffers(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.random.fork_rng():
            profiler = _Profiler(model, graph)
            profiler.run(*sample)
    finally:
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return profiler.profiles


def parameter_counts(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, float]:
    """Return for each step the number of parameter values that it is the first to use."""
    counted: set[int] = set()
    counts: dict[fx.Node, float] = {}
    for step in steps_of(graph):
        new = {id(p): p for p in parameters_of(model, step) if id(p) not in counted}
        counted |= new.keys()
        counts[step] = float(sum(parameter.numel() for parameter in new.values()))
    return counts


def parameters_of(model: nn.Module, step: fx.Node) -> list[nn.Parameter]:
    """Return the parameters of the module that a step calls, and those among its arguments."""
    parameters: list[nn.Parameter] = []
    if step.op == "call_module":
        parameters += model.get_submodule(str(step.target)).parameters()
    for source in step.all_input_nodes:
        if source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            value = getattr(model.get_submodule(owner), name)
            parameters += [value] if isinstance(value, nn.Parameter) else []
    return parameters


class _Profiler(fx.Interpreter):
    """Runs a graph step by step. Each step gets detached inputs, so it is differentiated alone."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.profiles: dict[fx.Node, StepProfile] = {}
        self._differentiable: set[int] = set()
        # Keeps tensors alive, so that an id in `_differentiable` is not used again.
        self._retained: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op in NO_COST_OPS:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        times_s = []
        value = None
        for _ in range(REPEATS):
            # A step may write into its inputs, so each run gets copies.
            copied_args, copied_kwargs = tree_map(self._copy, (args, kwargs))
            start_s = time.perf_counter()
            value = getattr(self, n.op)(n.target, copied_args, copied_kwargs)
            _backward(value)
            times_s.append(time.perf_counter() - start_s)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.profiles[n] = StepProfile(isinstance(value, Tensor), size_bytes, min(times_s))
        return tree_map(self._detach, value)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if id(value) in self._differentiable:
            # A clone of a leaf is no leaf, and may be written in place.
            return value.detach().requires_grad_().clone()
        return value.clone()

    def _detach(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        detached = value.detach()
        self._retained.append(detached)
        if value.requires_grad:
            self._differentiable.add(id(detached))
        return detached


def _backward(value: Any) -> None:
    """Differentiate all tensors in a step's value, with gradients of ones."""
    leaves = tree_leaves(value)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _last_use(step: fx.Node, index_of: Mapping[fx.Node, int], visited: set[fx.Node]) -> int:
    """Return the index of the last step that uses a value, also through recomputable nodes.

    The output counts as a use by the last step. -1: the value is never used.
    """
    last = -1
    for user in step.users:
        if user.op == "output":
            return len(index_of) - 1
        if user in index_of:
            last = max(last, index_of[user])
        elif user not in visited:
            visited.add(user)
            last = max(last, _last_use(user, index_of, visited))
    return last


def _is_sendable(node: fx.Node, profiles: Mapping[fx.Node, StepProfile] | None) -> bool:
    if profiles is not None:
        return profiles[node].is_tensor
    # A module whose value is only ever indexed returns a tuple, as an LSTM does.
    returns_tuple = node.op == "call_module" and all(_is_getitem(user) for user in node.users)
    return not (returns_tuple or _is_size_method(node) or _is_size_attribute(node))


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_size_method(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in SIZE_METHODS


def _is_size_attribute(node: fx.Node) -> bool:
    is_getattr = node.op == "call_function" and getattr(node.target, "__name__", "") == "getattr"
    return is_getattr and node.args[1] in SIZE_ATTRIBUTES


def _is_arithmetic(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
