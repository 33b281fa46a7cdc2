"""The whole model, for strategies that apply after it was cut in pipeline stages.

      stage 0   token_embedding  blocks.0         alive on this rank
      stage 1   blocks.1  norm  head              hollow here: names, shapes, and who is tied to whom

Every rank knows the same, so whatever follows from it is the same decision on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from shoal.platform.torch_private.module_state import own_buffers, own_parameters


@dataclass(frozen=True)
class FullModel:
    """All of a model of which a rank holds some stages.

    Attributes:
        model: its tensors have shapes, and memory only where this rank holds them.
        graphs: its forward pass in training and in evaluation; a unit is one node.
        steps: of each graph the nodes that are computed once, in order.
        begins: steps that stages 1, 2, ... begin with.
    """

    model: nn.Module
    graphs: tuple[fx.Graph, fx.Graph]
    steps: tuple[Sequence[fx.Node], Sequence[fx.Node]]
    begins: Sequence[int]

    @property
    def output_stage(self) -> int:
        """The stage that gives the model's output."""
        return len(self.begins)

    def stages_in(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """Step of one of `graphs` -> its stage."""
        steps = self.steps[self.graphs.index(graph)]
        marks = [0, *self.begins, len(steps)]
        return {step: stage for stage, (a, b) in enumerate(pairwise(marks)) for step in steps[a:b]}

    @cached_property
    def stages_by_module(self) -> dict[str, set[int]]:
        """Paths of the modules that stages call, with these stages."""
        found: dict[str, set[int]] = {}
        for step, stage in self.stages_in(self.graphs[0]).items():
            if step.op == "call_module":
                found.setdefault(str(step.target), set()).add(stage)
        return found

    @cached_property
    def directly_read_tensors(self) -> list[Tensor]:
        """Parameters and buffers that stages read by themselves, not through a module that they
        call.
        """
        paths = {
            str(node.target).rpartition(".")
            for node in self.graphs[0].nodes
            if node.op == "get_attr"
        }
        return [getattr(self.model.get_submodule(owner), name) for owner, _, name in sorted(paths)]

    def stages_running(self, path: str) -> set[int]:
        """Stages in which a module's own forward function runs: they call it, or what it lies
        in.
        """
        words = path.split(".")
        outer = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        return set().union(*(self.stages_by_module.get(name, set()) for name in outer))

    def called_twice(self, path: str) -> bool:
        """Whether a module is called by itself, and something that it lies in is called too."""
        words = path.split(".")
        return (
            sum(
                ".".join(words[:count]) in self.stages_by_module
                for count in range(1, len(words) + 1)
            )
            > 1
        )


def free_other_params(model: nn.Module, kept: nn.Module) -> None:
    """Take from `model` what is not in `kept`: its tensors have a shape and no memory
    afterwards.
    """
    alive = {id(tensor) for tensor in (*kept.parameters(), *kept.buffers())}
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or id(tensor) in alive:
                    continue
                if id(tensor) not in empty:
                    hollow = tensor.detach().to("meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    empty[id(tensor)] = (
                        nn.Parameter(hollow, tensor.requires_grad) if is_parameter else hollow
                    )
                store[name] = empty[id(tensor)]
