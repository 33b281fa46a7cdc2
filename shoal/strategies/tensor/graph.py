"""Forward passes as graphs of modules and functions, as far as torch.fx can look into them.

A module whose forward pass depends on values, or that fx cannot follow, is a leaf of the graph
around it, and the root of a graph of its own. What runs depends on more than the modules, so a
forward pass is looked at in training and in evaluation, and with its optional arguments given and
left out; only what is so in every graph counts.

What a module keeps for others to look at, self.seen = x say, is no edge of a graph. But the
tracer's stand-in for it outlives the tracer, and that marks its node."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules.container import ModuleDict, ModuleList

from shoal.strategies.full_model import FullModel
from shoal.strategies.tensor.conv1d_gpt2 import is_gpt2_conv1d

ESCAPES = "kept"
"""In the `meta` of a node: somebody has kept its value, outside of the graph."""


def graphs(
    model: nn.Module, leaves: set[nn.Module], uncut: FullModel | None = None
) -> Iterator[tuple[str, list[fx.Graph]]]:
    """For each module that is looked into as a root its name and its graphs, in which names count
    from the model.

    Args:
        leaves: modules that are not looked into.
        uncut: the model's forward pass as it was cut in stages; what stages call are roots then.
    """
    if uncut is not None:
        yield "", list(uncut.graphs)
    waiting = [("", model)] if uncut is None else _called_by_stages(model, uncut)
    while waiting:
        name, module = waiting.pop(0)
        if module in leaves or not any(True for _ in module.parameters()):
            continue
        opaque = set(leaves)
        found = None if isinstance(module, (ModuleList, ModuleDict)) else _graphs(module, opaque)
        below = list(module.named_children())
        if found is not None:
            yield name, found
            below = _outermost([(n, m) for n, m in module.named_modules() if m in opaque - leaves])
        waiting += [(f"{name}.{n}" if name else n, m) for n, m in below]


def _called_by_stages(model: nn.Module, uncut: FullModel) -> list[tuple[str, nn.Module]]:
    """Modules that stages call in one way, but for torch's own layers."""
    names = [name for name in sorted(uncut.stages_by_module) if not uncut.called_twice(name)]
    called = [(name, model.get_submodule(name)) for name in names]
    return [(name, module) for name, module in called if not _of_torch(module)]


def _of_torch(module: nn.Module) -> bool:
    """What a tracer does not look into: layers, and no containers."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = [name for name, _ in found]
    return [
        (name, m) for name, m in found if not any(name.startswith(f"{other}.") for other in names)
    ]


def _graphs(module: nn.Module, opaque: set[nn.Module]) -> list[fx.Graph] | None:
    """All of them, or None where one cannot be made; `opaque` gains what cannot be looked into."""
    modes = [(m, m.training) for m in module.modules()]
    found = []
    try:
        for training in (True, False):
            for left_out in _optional(module):
                for m, _ in modes:
                    m.training = training
                graph = _graph(module, opaque, left_out)
                if graph is None:
                    return None
                found.append(graph)
    finally:
        for m, mode in modes:
            m.training = mode
    return found


def _optional(module: nn.Module) -> list[dict[str, Any]]:
    """The optional arguments, given (as unknown values) and left out (as what they are then)."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return [{}, defaults] if defaults else [{}]


def _graph(module: nn.Module, opaque: set[nn.Module], left_out: dict[str, Any]) -> fx.Graph | None:
    before = [(m, dict(vars(m))) for m in module.modules()]
    while True:
        tracer = _LeafTracer(opaque)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = tracer.trace(module, left_out or None)
            tracer.mark_escaping()
            return graph
        except Exception:  # noqa: BLE001 - whatever a forward pass may say to values that are not there
            if tracer.failed is None:
                return None
            opaque.add(tracer.failed)
        finally:
            _restore(before)


def _restore(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Modules lose the stand-ins that they have kept."""
    for module, attributes in before:
        held = vars(module)
        for key in [key for key, value in held.items() if isinstance(value, fx.Proxy)]:
            del held[key]
            if key in attributes:
                held[key] = attributes[key]


class _LeafTracer(fx.Tracer):
    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque
        self.failed: nn.Module | None = None
        self.made: list[tuple[weakref.ref[fx.Proxy], fx.Node]] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        made = super().proxy(node)
        if node.op.startswith("call"):
            self.made.append((weakref.ref(made), node))
        return made

    def mark_escaping(self) -> None:
        """After the trace: nodes whose stand-ins somebody still has."""
        if any(made() is not None for made, _ in self.made):
            gc.collect()  # all ranks have to find the same
        for made, node in self.made:
            if made() is not None:
                node.meta[ESCAPES] = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            m in self.opaque
            or is_gpt2_conv1d(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if m not in self.opaque:  # else it is what the module around it does with it
                self.failed = self.failed or m  # the innermost one
            raise
