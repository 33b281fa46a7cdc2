"""One stage: a graph of its steps, and a module that holds what they use under the whole model's
names.

      whole model      token_embedding   blocks.0   blocks.1   blocks.2   norm   head
      stage 0          token_embedding   blocks.0   blocks.1
      stage 1                                                  blocks.2   norm   head          the same names

A stage is called with the model's inputs and with what the stage before it sends; it gives what is
sent to the next, the last one what the model gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from shoal.platform.torch_private.module_state import (
    STORES,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)
from shoal.strategies.pipeline.steps import live_across, recomputable_nodes, steps_of


class Stage:
    """The steps of one stage, in training and in evaluation.

    Modules are looked up by their paths in each pass, so that a strategy may put others in their
    places.

    Args:
        model: in which `training` and `evaluating` were traced.
        home: where its modules are.

    Attributes:
        received, sent: names of the values that cross the cuts before and behind this stage.
        targets: paths of the modules that it calls and of the parameters and buffers that it reads.
    """

    def __init__(
        self,
        model: nn.Module,
        home: StageModule,
        training: fx.Graph,
        evaluating: fx.Graph,
        received: list[str],
        sent: list[str],
    ) -> None:
        self.home, self.received, self.sent = home, received, sent
        graphs = (fx.GraphModule(model, graph) for graph in (evaluating, training))
        self._functions: list[Callable[..., Any]] = [type(graph).forward for graph in graphs]
        self.targets = fx_targets(training)

    def __call__(self, training: bool, *values: Any) -> Any:
        """The model's inputs, then what was received."""
        return self.home(self._functions[training], *values)

    def modules(self) -> list[nn.Module]:
        """What it calls, and all that lies inside."""
        found = (_lookup(self.home, path) for path in sorted(self.targets))
        return [
            inner for value in found if isinstance(value, nn.Module) for inner in value.modules()
        ]

    def parameters(self) -> list[nn.Parameter]:
        """What it uses, each once; in one order on all ranks, by which the half of a backward
        pass for weights goes.
        """
        found = [_lookup(self.home, path) for path in sorted(self.targets)]
        alone = [value for value in found if isinstance(value, nn.Parameter)]
        inside = [p for value in found if isinstance(value, nn.Module) for p in value.parameters()]
        return list({id(parameter): parameter for parameter in (*alone, *inside)}.values())


def stages(
    model: nn.Module, training: fx.Graph, evaluating: fx.Graph, begins: Sequence[int]
) -> list[Stage]:
    """All stages of a model that is cut before the steps `begins`."""
    both = [_cut(graph, begins) for graph in (training, evaluating)]
    sent = [[node.name for node in live_across(training)[place]] for place in begins]
    home = collect(model, fx_targets(training))
    return [
        Stage(model, home, a, b, received, after)
        for a, b, received, after in zip(*both, [[], *sent], [*sent, []], strict=True)
    ]


def apply_pre_hooks(
    model: nn.Module, hooks: Sequence[Callable[..., Any]], inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What the model's forward function gets of `inputs` after these hooks of the model itself,
    which nobody calls.
    """
    for hook in hooks:
        found = hook(model, inputs)
        if found is not None:
            inputs = found if isinstance(found, tuple) else (found,)
    return inputs


def fx_targets(graph: fx.Graph) -> set[str]:
    """Paths of what a graph calls and reads."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _lookup(home: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(home.get_submodule(owner), name)


def _cut(graph: fx.Graph, begins: Sequence[int]) -> list[fx.Graph]:
    steps, again, values = steps_of(graph), recomputable_nodes(graph), live_across(graph)
    marks = [0, *begins, len(steps)]
    parts = []
    for index, (start, stop) in enumerate(pairwise(marks)):
        last = index == len(marks) - 2
        sent = None if last else values[stop]
        parts.append(_part(graph, steps[start:stop], values[start] if index else [], sent, again))
    return parts


def _part(
    graph: fx.Graph,
    steps: Sequence[fx.Node],
    received: list[fx.Node],
    sent: list[fx.Node] | None,
    again: Set[fx.Node],
) -> fx.Graph:
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.node_copy(node)
    for node in received:
        copies[node] = part.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node in again or node.op == "get_attr", f"{node} belongs to another stage"
            copies[node] = part.node_copy(node, copy_of)
        return copies[node]

    for step in steps:
        copies[step] = part.node_copy(step, copy_of)
    if sent is not None:
        part.output(tuple(copies[node] for node in sent))
    else:
        output = next(node for node in graph.nodes if node.op == "output")
        part.output(fx.map_arg(output.args[0], copy_of))
    part.lint()
    return part


class NameTree(nn.ModuleDict):
    """A place in the tree of names; a container, so that what hangs on it counts as a block of
    the model.
    """

    def __getattribute__(self, name: str) -> Any:
        """What hangs here comes before what a ModuleDict can do: a model may well have layers
        called `values`.
        """
        if not name.startswith("_"):
            for store in STORES:
                found = super().__getattribute__("__dict__").get(store, {})
                if name in found:
                    return found[name]
        return super().__getattribute__(name)

    def put(
        self, path: str, value: nn.Module | nn.Parameter | Tensor, persistent: bool = True
    ) -> None:
        """Hang a module, a parameter or a buffer where it hangs in the whole model."""
        first, _, rest = path.partition(".")
        if rest:
            below = own_modules(self).get(first)
            if below is None:
                below = own_modules(self)[first] = NameTree()
            if isinstance(below, NameTree):  # else it is part of a module that hangs here already
                below.put(rest, value, persistent)
        elif isinstance(value, nn.Module):
            own_modules(self)[first] = value
        elif isinstance(value, nn.Parameter):
            own_parameters(self)[first] = value
        else:
            own_buffers(self)[first] = value
            if not persistent:
                non_persistent_buffers(self).add(first)


class StageModule(NameTree):
    """All that one rank holds of a model, under the names of the whole."""

    def forward(self, function: Callable[..., Any], *values: Any) -> Any:
        """One stage, as a call of this module: a strategy may stand around it as around any
        other.
        """
        return function(self, *values)


def collect(model: nn.Module, targets: Set[str], others: Set[str] = frozenset()) -> StageModule:
    """What `targets` are, and the parameters and buffers `others`, which no stage uses."""
    tree = StageModule()
    modules = dict(model.named_modules(remove_duplicate=False))
    # Outer ones first: what lies inside is there then. In one order on all ranks: they send one
    # tensor after the other.
    for path in sorted(targets | others, key=lambda path: (path.count("."), path)):
        owner, _, name = path.rpartition(".")
        value = modules.get(path)
        if value is not None:
            tree.put(path, value)
        else:
            home = model.get_submodule(owner)
            # A plain attribute that holds a tensor is in no state dict.
            plain = name not in own_parameters(home) and name not in own_buffers(home)
            tree.put(
                path, getattr(home, name), not plain and name not in non_persistent_buffers(home)
            )
    return tree


def unused(model: nn.Module, all_targets: Set[str]) -> set[str]:
    """Names of parameters and buffers that no stage uses."""
    used = collect(model, all_targets)
    seen = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if id(tensor) not in seen}
