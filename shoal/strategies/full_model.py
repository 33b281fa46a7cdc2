"""The full model, for strategies that apply after the pipeline has divided it into stages.

      stage 0   token_embedding  blocks.0     on this rank: tensors with values
      stage 1   blocks.1  norm  head          elsewhere: names, shapes and ties, tensors on `meta`

Every rank has the same description, so decisions that follow from it are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.weights.deferred_init import EmptyTensor


@dataclass(frozen=True)
class FullModel:
    """The full model of which this rank holds some stages.

    Attributes:
        model: all modules. A tensor of another rank's stage has a shape and no memory.
        stages_by_unit: path of each unit -> the stages that call it. A unit is a module that stages
            call whole; modules around units run in parts, in several stages.
        output_stage: index of the stage that returns the model's output.
        directly_read: paths of the parameters that code around units reads.
    """

    model: nn.Module
    stages_by_unit: Mapping[str, Set[int]]
    output_stage: int
    directly_read: Sequence[str]

    def stages_in(self, graph: fx.Graph, root: str = "") -> dict[fx.Node, int]:
        """Map each node of a forward pass to its stage.

        What is computed between two units belongs to the stage of the first one.

        Args: root: path of the module whose forward pass the graph is.
        """
        stages = {}
        prefix = f"{root}." if root else ""
        stage = max(self.stages_running(root), default=0)
        for node in graph.nodes:
            if node.op == "call_module":
                stage = max(self.stages_running(f"{prefix}{node.target}"), default=stage)
            stages[node] = stage
        return stages

    @cached_property
    def second_names(self) -> Mapping[str, str]:
        """Map each name of a tensor in a module that stands at several places to its first name."""
        first_paths: dict[int, str] = {}
        names: dict[str, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            first = first_paths.setdefault(id(module), path)
            if first != path:
                own = (*own_parameters(module), *own_buffers(module))
                names |= {f"{path}.{name}": f"{first}.{name}" for name in own}
        return names

    def runs_whole(self, path: str) -> bool:
        """Return whether a module's own forward function runs in one piece: it is a unit, lies in
        one, or contains none.
        """
        in_unit = any(prefix in self.stages_by_unit for prefix in prefixes(path))
        start = f"{path}." if path else ""
        return in_unit or not any(unit.startswith(start) for unit in self.stages_by_unit)

    def stages_running(self, path: str) -> Set[int]:
        """Return the stages that call a module, or a module that contains it, as a unit."""
        return set().union(*(self.stages_by_unit.get(unit, set()) for unit in prefixes(path)))


def prefixes(path: str) -> list[str]:
    """Return a module's path and those of the modules that contain it: a, a.b, a.b.c."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


def enclosing(path: str, names: Container[str]) -> str | None:
    """Return the innermost of some modules that is the one at `path` or contains it, by name."""
    return next((name for name in reversed(prefixes(path)) if name in names), None)


def free_other_params(model: nn.Module, local_modules: nn.Module) -> None:
    """Replace all tensors of `model` that are not in `local_modules` by tensors on the meta device.

    A script may hold the old parameters. They keep no values, which would soon be out of date: they
    become NaN, without memory, and the new ones lead to them (`given_up_params`).

    Args: local_modules: the modules of this rank's stages.
    """
    alive = {id(tensor) for tensor in (*local_modules.parameters(), *local_modules.buffers())}
    empty: dict[int, Tensor] = {}  # one for each tensor, so that tied parameters stay tied
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or id(tensor) in alive:
                    continue
                if id(tensor) not in empty:
                    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    empty[id(tensor)] = _given_up(tensor, hollow) if is_parameter else hollow
                store[name] = empty[id(tensor)]


def _given_up(parameter: nn.Parameter, hollow: Tensor) -> nn.Parameter:
    """Take a parameter's values away; return a new one in its place."""
    new = nn.Parameter(hollow, parameter.requires_grad)
    new.shoal_given_up = parameter  # type: ignore[attr-defined]
    if not parameter.is_meta and not isinstance(parameter, EmptyTensor):
        nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)
        parameter.grad = None
    return new


def given_up_params(parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Yield the old parameters in whose place this one is."""
    old = getattr(parameter, "shoal_given_up", None)
    while old is not None:
        yield old
        old = getattr(old, "shoal_given_up", None)
