"""The blocks that a model is made of: what is gathered at once, recomputed at once.

Models repeat themselves, and write it down as a Sequential, a ModuleList or a ModuleDict: layers of
a transformer, blocks of a CNN. The members of such containers are the units. One that is a large
part of the model, and not one of several alike, is cut finer; what is tiny stays with what
surrounds it.

      GPT                                       ResNet
      ├── embed                                 ├── conv1
      ├── blocks ── [Block] [Block] [Block]     ├── layer1 ── [Bottleneck] [Bottleneck]
      └── head                                  ├── ...
                                                └── fc
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
"""Share of the model's parameters below which a block is no unit: messages would be many and
small.
"""
LARGEST = 1 / 3
"""Share of the model's parameters above which a unit is cut finer, where it has units itself
and no equals.
"""


def units(model: nn.Module, kind: str = "") -> dict[str, nn.Module]:
    """The units of `model` by name, in order, outer ones before those inside them.

    Args: kind: name of a class, such as "Block": its instances are the units. Empty for the rule
        above.

    Raises: StrategyRefused: the model has no module of that class.
    """
    paths = _Paths(model)
    if kind:
        found = {
            name: m
            for name, m in model.named_modules()
            if type(m).__name__ == kind and m is not model
        }
        if not found:
            classes = sorted({type(m).__name__ for m in model.modules()})
            raise StrategyRefused(
                f"unit={kind}: the model has no module of that class; {did_you_mean(kind, classes)}"
            )
        return {name: module for name, module in found.items() if paths.only_through(module)}
    total = _size(model)
    found = {} if total == 0 else dict(_candidates(model, "", total, paths))
    first = {id(module): name for name, module in reversed(found.items())}
    return {name: module for name, module in found.items() if first[id(module)] == name}


def innermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `units` without units inside."""
    return {
        name: m
        for name, m in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
    }


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random masks in training."""
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return False


def _candidates(
    module: nn.Module, prefix: str, total: int, paths: _Paths
) -> Iterator[tuple[str, nn.Module]]:
    repeats = isinstance(module, CONTAINERS)
    alike = Counter(type(child) for child in module.children() if type(child) not in CONTAINERS)
    for name, child in module.named_children():
        path, share = f"{prefix}{name}", _size(child) / total
        is_block = repeats and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        alone = is_block or isinstance(child, RECURRENT)
        unit = alone and share >= SMALLEST and paths.only_through(child)
        if unit:
            yield path, child
        if not unit or (share > LARGEST and alike[type(child)] < 2):
            yield from _candidates(child, f"{path}.", total, paths)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _Paths:
    """By how many paths the modules and parameters of a model are reached from it."""

    def __init__(self, model: nn.Module) -> None:
        self.to_modules = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self.to_parameters = _paths_to_parameters(model)
        self.holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

    def only_through(self, module: nn.Module) -> bool:
        """Whether `module` holds no parameter that another module holds too, or that can be reached
        without it: such a parameter stays where all can reach it."""
        times = self.to_modules[id(module)]
        inside = _paths_to_parameters(module)
        return all(
            self.holders[p] == 1 and self.to_parameters[p] == times * count
            for p, count in inside.items()
        )


def _paths_to_parameters(module: nn.Module) -> Counter[int]:
    modules = module.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, m in modules for p in m.parameters(recurse=False))
