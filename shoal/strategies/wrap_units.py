"""Wrap units: modules whose parameters are gathered, recomputed or sent together.

      GPT                                       ResNet
      ├── embed                                 ├── conv1
      ├── blocks ── [Block] [Block] [Block]     ├── layer1 ── [Bottleneck] [Bottleneck]
      └── head                                  ├── ...
                                                └── fc                  [ ] is a unit

Models hold repeated blocks in a Sequential, a ModuleList or a ModuleDict: layers of a transformer,
blocks of a CNN. The members of these containers are the units. A unit that is a large share of the
model, without siblings of its class, is divided further. A tiny member is no unit, and stays with
the module around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from shoal.errors import StrategyRefused, did_you_mean
from shoal.platform.torch_private.module_state import DropoutBase

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
SMALLEST = 1 / 200
"""Smallest share of the model's parameters of a unit. Smaller ones would make many short
messages.
"""
LARGEST = 1 / 3
"""Share of the model's parameters above which a unit is divided into the units inside it, unless
it has siblings of its class.
"""


def units(model: nn.Module, kind: str = "") -> dict[str, nn.Module]:
    """Return the units of `model` by name, in the order of modules, outer ones first.

    Args: kind: name of a class, such as "Block", whose instances are the units. Empty for the rule
        at the top of this file.

    Raises: StrategyRefused: the model has no module of that class.
    """
    paths = _Paths(model)
    if kind:
        instances = {
            name: module
            for name, module in model.named_modules()
            if type(module).__name__ == kind and module is not model
        }
        if not instances:
            classes = sorted({type(m).__name__ for m in model.modules()})
            raise StrategyRefused(
                f"unit={kind}: the model has no module of that class; {did_you_mean(kind, classes)}"
            )
        return {name: module for name, module in instances.items() if paths.only_through(module)}
    total = num_parameters(model)
    candidates = {} if total == 0 else dict(_candidates(model, "", total, paths))
    # A module of several names is a unit under its first name only.
    first_names = {id(module): name for name, module in reversed(candidates.items())}
    return {name: m for name, m in candidates.items() if first_names[id(m)] == name}


def innermost(wrap_units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the units that have no units inside."""
    return {
        name: module
        for name, module in wrap_units.items()
        if not any(other.startswith(f"{name}.") for other in wrap_units)
    }


def user_models(module: nn.Module) -> list[nn.Module]:
    """Return the models that the user calls: the module, or those of a container."""
    is_container = type(module).forward is nn.Module.forward
    return [*module.children()] if is_container else [module]


def has_dropout(module: nn.Module) -> bool:
    """Return True if a module draws random masks in training."""
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return False


def _candidates(
    module: nn.Module, prefix: str, total: int, paths: _Paths
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units below `module` with their names.

    Args:
        prefix: path of `module` with a dot; empty for the model.
        total: number of parameters of the model.
    """
    is_container = isinstance(module, CONTAINERS)
    siblings = Counter(type(child) for child in module.children() if type(child) not in CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        share = num_parameters(child) / total
        # ModuleList and ModuleDict have no forward function, so they run as nothing.
        is_block = is_container and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        may_be_unit = is_block or isinstance(child, RECURRENT)
        is_unit = may_be_unit and share >= SMALLEST and paths.only_through(child)
        if is_unit:
            yield path, child
        if not is_unit or (share > LARGEST and siblings[type(child)] < 2):
            yield from _candidates(child, f"{path}.", total, paths)


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers the parameters of a module have."""
    return sum(parameter.numel() for parameter in module.parameters())


class _Paths:
    """Counts the paths from a model to each of its modules and parameters.

    A module or a parameter that is registered twice has two paths.
    """

    def __init__(self, model: nn.Module) -> None:
        self.to_modules = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self.to_parameters = _paths_to_parameters(model)
        self.owners = Counter(
            id(p) for m in model.modules() for p in nn.Module.parameters(m, recurse=False)
        )

    def only_through(self, module: nn.Module) -> bool:
        """Return True if every path to the parameters of `module` goes through `module`.

        A parameter that is shared with a module outside, as tied parameters are, must stay outside
        of the unit, for it is used while the unit is freed.
        """
        paths_to_module = self.to_modules[id(module)]
        return all(
            self.owners[parameter] == 1 and self.to_parameters[parameter] == paths_to_module * paths
            for parameter, paths in _paths_to_parameters(module).items()
        )


def _paths_to_parameters(module: nn.Module) -> Counter[int]:
    """Map the id of each parameter to the number of paths from `module` to it."""
    modules = module.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, m in modules for p in nn.Module.parameters(m, recurse=False))
