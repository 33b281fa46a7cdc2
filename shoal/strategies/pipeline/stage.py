"""One stage of a partitioned model: a part of the traced graph, as a function.

      graph     input ─ a ─ b ─┬─ c ─ d ─+─ e ─ output
                               └─────────┘
      stage 0   input ─ a ─ b ─> (b)
      stage 1   input, (b) ─ c ─> (b, c)             the shortcut b is carried along
      stage 2   input, (b, c) ─ d ─ e ─> output

Every stage is called with the model's inputs and with the values that the stage before sends. It
returns the values for the next stage; the last stage returns the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from typing import Any

from torch import fx, nn

from shoal.strategies.pipeline.stage_module import StageModule, collect
from shoal.strategies.pipeline.steps import live_across, recomputable_nodes, steps_of


class Stage:
    """The steps of one stage, in training and in evaluation.

    Modules are looked up by their paths in each pass, so that other strategies may replace them.

    Args:
        model: the model that was traced.
        home: the module in which the stage finds its modules and tensors.
        training, evaluating: graphs of this stage alone.
        received, sent: names of the values that come from the stage before, and go to the next.

    Attributes:
        targets: paths of the modules that the stage calls, and of the parameters and buffers that
            it reads.
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
        self.home = home
        self.received = received
        self.sent = sent
        self.targets = fx_targets(training)
        # Indexed by `training`: False, True. fx compiles a graph into the `forward` of a class.
        modules = [fx.GraphModule(model, graph) for graph in (evaluating, training)]
        self._functions: list[Callable[..., Any]] = [type(module).forward for module in modules]

    def __call__(self, training: bool, *values: Any) -> Any:
        """Run the stage.

        Args: values: the model's inputs, then the received values.
        """
        return self.home(self._functions[training], *values)

    def modules(self) -> list[nn.Module]:
        """Return the modules that the stage calls, and all modules inside them."""
        called = [value for value in self._lookup_targets() if isinstance(value, nn.Module)]
        return [inner for module in called for inner in module.modules()]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the stage uses, each once.

        The order is the same on all ranks; a split backward pass depends on it.
        """
        values = self._lookup_targets()
        read = [value for value in values if isinstance(value, nn.Parameter)]
        called = [value for value in values if isinstance(value, nn.Module)]
        inside = [parameter for module in called for parameter in module.parameters()]
        return list({id(parameter): parameter for parameter in (*read, *inside)}.values())

    def _lookup_targets(self) -> list[Any]:
        return [_lookup(self.home, path) for path in sorted(self.targets)]


def stages(
    model: nn.Module, training: fx.Graph, evaluating: fx.Graph, stage_starts: Sequence[int]
) -> list[Stage]:
    """Return all stages of a model.

    Args:
        training, evaluating: graphs of the full model.
        stage_starts: first steps of stages 1, 2, ...
    """
    training_parts = _partition(training, stage_starts)
    evaluating_parts = _partition(evaluating, stage_starts)
    live = live_across(training)
    crossing = [[node.name for node in live[start]] for start in stage_starts]
    home = collect(model, fx_targets(training))
    return [
        Stage(model, home, train_part, eval_part, received, sent)
        for train_part, eval_part, received, sent in zip(
            training_parts, evaluating_parts, [[], *crossing], [*crossing, []], strict=True
        )
    ]


def apply_pre_hooks(
    model: nn.Module, hooks: Sequence[Callable[..., Any]], inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the inputs of the model's forward function after its own forward pre-hooks.

    No rank calls the model itself, so nobody else would run these hooks.
    """
    for hook in hooks:
        result = hook(model, inputs)
        if result is not None:
            inputs = result if isinstance(result, tuple) else (result,)
    return inputs


def fx_targets(graph: fx.Graph) -> set[str]:
    """Return the paths of modules that a graph calls, and of attributes that it reads."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _lookup(home: nn.Module, path: str) -> Any:
    owner_path, _, name = path.rpartition(".")
    return getattr(home.get_submodule(owner_path), name)


def _partition(graph: fx.Graph, stage_starts: Sequence[int]) -> list[fx.Graph]:
    """Divide a graph into one graph for each stage."""
    steps = steps_of(graph)
    recomputable = recomputable_nodes(graph)
    live = live_across(graph)
    boundaries = [0, *stage_starts, len(steps)]
    parts = []
    for start, stop in pairwise(boundaries):
        received = live[start] if start else []
        sent = live[stop] if stop < len(steps) else None
        parts.append(_stage_graph(graph, steps[start:stop], received, sent, recomputable))
    return parts


def _stage_graph(
    graph: fx.Graph,
    steps: Sequence[fx.Node],
    received: list[fx.Node],
    sent: list[fx.Node] | None,
    recomputable: Set[fx.Node],
) -> fx.Graph:
    """Copy the steps of one stage into a graph of their own.

    Args: sent: values for the next stage; None in the last stage, which returns the output.
    """
    stage_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = stage_graph.node_copy(node)
    for node in received:
        copies[node] = stage_graph.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        # Sizes and attributes are copied into every stage that uses them.
        if node not in copies:
            assert node in recomputable or node.op == "get_attr", f"{node} belongs to another stage"
            copies[node] = stage_graph.node_copy(node, copy_of)
        return copies[node]

    for step in steps:
        copies[step] = stage_graph.node_copy(step, copy_of)
    if sent is not None:
        stage_graph.output(tuple(copies[node] for node in sent))
    else:
        output = next(node for node in graph.nodes if node.op == "output")
        stage_graph.output(fx.map_arg(output.args[0], copy_of))
    stage_graph.lint()
    return stage_graph
