"""The steps of a traced model in order, what each gives and costs, and what crosses each place
between two of them.

      input ── step 0 ── step 1 ──┬── step 2 ── step 3 ──+── step 4 ── output
                                  └──────────────────────┘
      place 2 is crossed by step 1's value, place 3 by step 1's and step 2's: a shortcut is carried
      along

Model inputs cross nothing: every rank of a pipeline has the whole batch. Parameters do not either:
a stage that uses one holds it. Numbers such as sizes are computed again wherever they follow from
inputs alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.strategies.pipeline.buffer_updates import Buffers

NO_COST_OPS = ("placeholder", "get_attr", "output")
SIZES = ("size", "dim", "numel", "__len__", "ndimension")
REPEATS = 3


@dataclass(frozen=True)
class StepProfile:
    """What a step gave on a sample.

    Attributes:
        is_tensor: nothing else crosses from stage to stage.
        size_bytes: of what it gave.
        time_s: forward and backward.
    """

    is_tensor: bool
    size_bytes: int
    time_s: float


def steps_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are computed once, in order; what is computed wherever it is used is not
    among them.
    """
    again = recomputable_nodes(graph)
    return [node for node in graph.nodes if node.op not in NO_COST_OPS and node not in again]


def recomputable_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that give numbers and follow from inputs alone: sizes, and arithmetic on them."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in NO_COST_OPS or node.op == "call_module":
            continue
        asks = (node.op == "call_method" and node.target in SIZES) or _is_shape(node)
        sources = node.all_input_nodes
        of_inputs = asks and all(source.op == "placeholder" for source in sources)
        of_numbers = bool(sources) and all(source in numbers for source in sources)
        if of_inputs or (of_numbers and (asks or _is_arithmetic(node))):
            numbers.add(node)
    return numbers


def live_across(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each place, before step 0 to after the last one, the steps whose values are needed on
    both of its sides.
    """
    steps = steps_of(graph)
    number = {step: index for index, step in enumerate(steps)}
    last_use = {step: _last_use(step, number, set()) for step in steps}
    return [
        [step for step in steps[:place] if last_use[step] >= place]
        for place in range(len(steps) + 1)
    ]


def cut_points(graph: fx.Graph, seen: Mapping[fx.Node, StepProfile] | None) -> list[int]:
    """Where a model can be cut: numbers of the steps that may begin a stage."""
    values = live_across(graph)
    return [
        place
        for place in range(1, len(values) - 1)
        if all(_may_cross(node, seen) for node in values[place])
    ]


def profile(
    model: nn.Module, graph: fx.Graph, sample: tuple[Any, ...]
) -> dict[fx.Node, StepProfile]:
    """Run each step forward and backward on a sample; buffers and gradients of the model stay
    as they were.
    """
    buffers = Buffers(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.random.fork_rng():
            watcher = _Watcher(model, graph)
            watcher.run(*sample)
    finally:
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return watcher.seen


def sizes(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, float]:
    """Numbers of parameters that each step uses for the first time."""
    counted: set[int] = set()
    found: dict[fx.Node, float] = {}
    for step in steps_of(graph):
        mine = {id(p): p for p in parameters_of(model, step) if id(p) not in counted}
        counted |= mine.keys()
        found[step] = float(sum(parameter.numel() for parameter in mine.values()))
    return found


def parameters_of(model: nn.Module, step: fx.Node) -> list[nn.Parameter]:
    """What a step uses: of the module that it calls, or given to it by itself."""
    found = (
        list(model.get_submodule(str(step.target)).parameters()) if step.op == "call_module" else []
    )
    for source in step.all_input_nodes:
        if source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            value = getattr(model.get_submodule(owner), name)
            found += [value] if isinstance(value, nn.Parameter) else []
    return found


class _Watcher(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.seen: dict[fx.Node, StepProfile] = {}
        self.kept: list[Tensor] = []  # alive, so that an id stands for one of them only
        self.has_gradient: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op in NO_COST_OPS:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        times_s = []
        value = None
        for _ in range(REPEATS):
            # Copies, for a step may write into what it is given.
            own = tree_map(self._copy, (args, kwargs))
            begin = time.perf_counter()
            value = getattr(self, n.op)(n.target, *own)
            outputs = [
                leaf
                for leaf in tree_leaves(value)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            times_s.append(time.perf_counter() - begin)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.seen[n] = StepProfile(isinstance(value, Tensor), size_bytes, min(times_s))
        return tree_map(self._detached, value)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if id(value) in self.has_gradient:
            return (
                value.detach().requires_grad_().clone()
            )  # no leaf itself: steps may work in place
        return value.clone()

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        plain = value.detach()
        self.kept.append(plain)
        if value.requires_grad:
            self.has_gradient.add(id(plain))
        return plain


def _last_use(step: fx.Node, number: Mapping[fx.Node, int], looked: set[fx.Node]) -> int:
    last = -1
    for user in step.users:
        if user.op == "output":
            return len(number) - 1
        if user in number:
            last = max(last, number[user])
        elif user not in looked:
            looked.add(user)
            last = max(last, _last_use(user, number, looked))
    return last


def _may_cross(node: fx.Node, seen: Mapping[fx.Node, StepProfile] | None) -> bool:
    if seen is not None:
        return seen[node].is_tensor
    gives_many = node.op == "call_module" and all(_is_item(user) for user in node.users)
    return (
        not gives_many
        and not (node.op == "call_method" and node.target in SIZES)
        and not _is_shape(node)
    )


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_shape(node: fx.Node) -> bool:
    named = node.op == "call_function" and getattr(node.target, "__name__", "") == "getattr"
    return named and node.args[1] in ("shape", "ndim", "device", "dtype")


def _is_arithmetic(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
