"""The full model, for strategies that apply after the pipeline has divided it into stages.

      stage 0   token_embedding  blocks.0     on this rank: tensors with values
      stage 1   blocks.1  norm  head          elsewhere: names, shapes and ties, tensors on `meta`

Every rank has the same description, so decisions that follow from it are the same on all ranks.
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
    """The full model of which this rank holds some stages.

    Attributes:
        model: all modules. A tensor of another rank's stage has a shape and no memory.
        graphs: fx graphs of the forward pass in training and in evaluation. A wrap unit is one
            node.
        steps: for each graph the nodes that are computed once, in order.
        begins: indices into `steps` at which stages 1, 2, ... begin.
    """

    model: nn.Module
    graphs: tuple[fx.Graph, fx.Graph]
    steps: tuple[Sequence[fx.Node], Sequence[fx.Node]]
    begins: Sequence[int]

    @property
    def output_stage(self) -> int:
        """Index of the stage that returns the model's output."""
        return len(self.begins)

    def stages_in(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """Map each step of one of `graphs` to its stage."""
        steps = self.steps[self.graphs.index(graph)]
        boundaries = [0, *self.begins, len(steps)]
        stages = {}
        for stage, (start, end) in enumerate(pairwise(boundaries)):
            stages.update(dict.fromkeys(steps[start:end], stage))
        return stages

    @cached_property
    def stages_by_module(self) -> dict[str, set[int]]:
        """Map the path of each module that is called to the stages that call it."""
        stages_by_path: dict[str, set[int]] = {}
        for step, stage in self.stages_in(self.graphs[0]).items():
            if step.op == "call_module":
                stages_by_path.setdefault(str(step.target), set()).add(stage)
        return stages_by_path

    @cached_property
    def directly_read_tensors(self) -> list[Tensor]:
        """Parameters and buffers that a stage reads without calling the module that owns them."""
        paths = {
            str(node.target).rpartition(".")
            for node in self.graphs[0].nodes
            if node.op == "get_attr"
        }
        return [getattr(self.model.get_submodule(owner), name) for owner, _, name in sorted(paths)]

    def stages_running(self, path: str) -> set[int]:
        """Return the stages in which a module's own forward function runs.

        They call the module itself, or a module that contains it.
        """
        paths = _prefixes(path)
        return set().union(*(self.stages_by_module.get(prefix, set()) for prefix in paths))

    def called_twice(self, path: str) -> bool:
        """Return True if a module is called, and a module that contains it is called too."""
        return sum(prefix in self.stages_by_module for prefix in _prefixes(path)) > 1


def _prefixes(path: str) -> list[str]:
    """Return a module's path and those of the modules that contain it: a, a.b, a.b.c."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


def free_other_params(model: nn.Module, kept: nn.Module) -> None:
    """Replace all tensors of `model` that are not in `kept` by tensors on the meta device.

    Args: kept: the modules of this rank's stages.
    """
    alive = {id(tensor) for tensor in (*kept.parameters(), *kept.buffers())}
    empty: dict[int, Tensor] = {}  # one for each tensor, so that tied parameters stay tied
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
