"""Names of modules and parameters of a script's models, the same with and without wrappers.

    DistributedDataParallel(Net)    module.body.0.weight    ->  body.0.weight
    torch.compile(Net)              _orig_mod.body.0.weight ->  body.0.weight

A model is a module that no other module contains. The first one that is called has bare names, a
further one the name of its class before them: `Discriminator.body.0.weight`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from shoal.run.preparation import ModelGroup

WRAPPERS = {
    "_orig_mod": None,
    "_fsdp_wrapped_module": None,
    "_checkpoint_wrapped_module": None,
    "_forward_module": None,
    "_original_module": None,
    "module": ("DistributedDataParallel", "DataParallel"),
}
"""Attribute of a wrapper that holds the wrapped module -> classes of wrappers; None: any."""


class ModelNames:
    """Names of all modules and parameters of the models that have been called.

    Attributes: roots: the models, in the order of their first call -> what their names begin with.
    """

    def __init__(self) -> None:
        self.roots: dict[nn.Module, str] = {}
        self._modules: dict[int, str] = {}
        self._strangers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def use(self, root: nn.Module) -> None:
        """Take the names of this module alone, which holds all models."""
        self.roots = {root: ""}
        self.refresh()

    def refresh(self) -> None:
        """Read the names of modules anew, after the model was changed."""
        self._modules = {}
        for root, prefix in self.roots.items():
            self._add(root, prefix)

    def name_of(self, module: nn.Module) -> str | None:
        """Return a module's name; None for one of no model, such as a loss function."""
        return self._modules.get(id(module))

    def find(self, module: nn.Module) -> str | None:
        """Return the same as `name_of`; look for the model where the module is new."""
        if id(module) not in self._modules and module not in self._strangers:
            root = _root_of(module)
            if root in self.roots:  # a layer that was added later
                self.refresh()
            elif next(root.parameters(), None) is not None:
                self.roots[root] = self._new_prefix(root)
                self._add(root, self.roots[root])
            else:
                self._strangers.add(module)
        return self.name_of(module)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models under their names, as they are now."""
        return self._named(nn.Module.named_parameters)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all models under their names."""
        return self._named(nn.Module.named_buffers)

    def _named(self, tensors_of: Callable[[nn.Module], Iterator[Any]]) -> Iterator[Any]:
        for root, prefix in self.roots.items():
            for name, tensor in tensors_of(root):
                yield _joined(prefix, plain_name(root, name)), tensor

    def _add(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules():
            self._modules.setdefault(id(module), _joined(prefix, plain_name(root, name)))

    def _new_prefix(self, root: nn.Module) -> str:
        if not self.roots:
            return ""
        kind = type(root).__name__
        prefix, number = kind, 2
        while prefix in self.roots.values():
            prefix, number = f"{kind}{number}", number + 1
        return prefix


def plain_name(root: nn.Module, name: str) -> str:
    """Return the name of a module or tensor of `root` without the attributes of wrappers."""
    parts = []
    module: nn.Module | None = root
    for part in name.split(".") if name else ():
        kinds = WRAPPERS.get(part, ())
        if kinds is not None and type(module).__name__ not in kinds:
            parts.append(part)
        child = getattr(module, part, None) if module is not None else None
        module = child if isinstance(child, nn.Module) else None
    return ".".join(parts)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _root_of(module: nn.Module) -> nn.Module:
    """Return the outermost module that contains `module`."""
    # By type, for `isinstance` would ask objects that load themselves when they are looked at.
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    models = [module for module in live if not isinstance(module, ModelGroup)]
    parents = {id(child): parent for parent in models for child in parent.children()}
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module = parents[id(module)]
    return module
