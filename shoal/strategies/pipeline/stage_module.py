"""The modules and tensors of one rank, under the names that they have in the full model.

      full model       token_embedding   blocks.0   blocks.1   blocks.2   norm   head
      stage 0          token_embedding   blocks.0   blocks.1
      stage 1                                                  blocks.2   norm   head

Names stay, so optimizers, files and checkpoints do not depend on the partition of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from torch import Tensor, nn

from shoal.platform.torch_private.module_state import (
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)


class NameTree(nn.ModuleDict):
    """A node in the tree of names.

    It is a container, so that other strategies treat its children as blocks of the model. A layer
    may be called `values`, so children are looked up in the tables of modules, not as attributes.
    """

    def put(
        self, path: str, value: nn.Module | nn.Parameter | Tensor, persistent: bool = True
    ) -> None:
        """Insert a module, parameter or buffer under its path in the full model."""
        first, _, rest = path.partition(".")
        if rest:
            child = own_modules(self).get(first)
            if child is None:
                child = own_modules(self)[first] = NameTree()
            # Any other child is a module of the model, which contains `rest` already.
            if isinstance(child, NameTree):
                child.put(rest, value, persistent)
        elif isinstance(value, nn.Module):
            own_modules(self)[first] = value
        elif isinstance(value, nn.Parameter):
            own_parameters(self)[first] = value
        else:
            own_buffers(self)[first] = value
            if not persistent:
                non_persistent_buffers(self).add(first)


class StageModule(NameTree):
    """All modules, parameters and buffers of one rank."""

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run one stage as a call of this module, so that other strategies can wrap it as they
        wrap any module.
        """
        return function()


def collect(model: nn.Module, targets: Set[str], others: Set[str] = frozenset()) -> StageModule:
    """Return a module that holds some modules, parameters and buffers of a model.

    Args:
        targets: paths of what the stages use.
        others: paths of parameters and buffers that no stage uses.
    """
    tree = StageModule()
    modules = dict(model.named_modules(remove_duplicate=False))
    # Outer paths first, so that `put` finds an inner path inside its module. All ranks use one
    # order, since they send parameters one after the other.
    for path in sorted(targets | others, key=lambda path: (path.count("."), path)):
        if path in modules:
            tree.put(path, modules[path])
            continue
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        # A tensor in a plain attribute is in no state dict, and must not get into one here.
        is_plain = name not in own_parameters(owner) and name not in own_buffers(owner)
        persistent = not is_plain and name not in non_persistent_buffers(owner)
        tree.put(path, getattr(owner, name), persistent)
    return tree


def unused(model: nn.Module, all_targets: Set[str]) -> set[str]:
    """Return the names of parameters and buffers that no stage uses.

    Args: all_targets: the targets of all stages.
    """
    used = collect(model, all_targets)
    used_ids = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if id(tensor) not in used_ids}
