"""Forward passes as graphs of modules and functions, as far as torch.fx can trace them.

A module whose forward pass depends on values, or that fx cannot trace, is a leaf in the graph
around it. It becomes the root of a graph of its own.

A forward pass may run in another way in evaluation, or with other optional arguments. So each root
is traced in training and in evaluation, with optional arguments given and left out. A plan uses
only pairs that are in all of these graphs.

A module may keep a value, as in `self.seen = x`. fx has no edge for that. But the tracer's proxy
for this value stays alive after the trace, and so the tracer can mark its node.
"""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules.container import ModuleDict, ModuleList

from shoal.strategies.module_snapshot import restored_modules
from shoal.strategies.tensor.candidates import is_gpt2_conv1d

ESCAPES = "kept"
"""Key in the `meta` of a node: its value is still referenced after the trace."""


RootGraphs = tuple[str, list[fx.Graph]]
Trace = Callable[[nn.Module, set[nn.Module]], Iterable[RootGraphs]]


def forward_graphs(model: nn.Module, leaves: set[nn.Module]) -> Iterator[RootGraphs]:
    """Yield the name and the graphs of each module that is traced as a root.

    Names in a graph count from its root.

    Args: leaves: modules that are not traced.
    """
    queue = [("", model)]
    while queue:
        name, module = queue.pop(0)
        if module in leaves or not any(True for _ in module.parameters()):
            continue
        opaque = set(leaves)
        is_list = isinstance(module, (ModuleList, ModuleDict))  # without a forward pass
        graphs = None if is_list else _trace_all_modes(module, opaque)
        if graphs is None:
            next_roots = list(module.named_children())
        else:
            yield name, graphs
            untraced = opaque - leaves
            next_roots = _outermost([(n, m) for n, m in module.named_modules() if m in untraced])
        queue += [(f"{name}.{n}" if name else n, m) for n, m in next_roots]


def _outermost(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Drop modules that lie in another one of the list."""
    names = [name for name, _ in modules]
    return [
        (name, module)
        for name, module in modules
        if not any(name.startswith(f"{other}.") for other in names)
    ]


def _trace_all_modes(module: nn.Module, opaque: set[nn.Module]) -> list[fx.Graph] | None:
    """Trace a module in all its modes; return None if one of them cannot be traced.

    Args: opaque: modules that are leaves; gains the modules that cannot be traced.
    """
    modes = [(m, m.training) for m in module.modules()]
    graphs = []
    try:
        for training in (True, False):
            for concrete_args in _optional_arguments(module):
                for m, _ in modes:
                    m.training = training
                graph = _trace(module, opaque, concrete_args)
                if graph is None:
                    return None
                graphs.append(graph)
    finally:
        for m, mode in modes:
            m.training = mode
    return graphs


def _optional_arguments(module: nn.Module) -> list[dict[str, Any]]:
    """Return what fx takes as `concrete_args`: {} for arguments given, defaults for left out."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return [{}, defaults] if defaults else [{}]


def _trace(
    module: nn.Module, opaque: set[nn.Module], concrete_args: dict[str, Any]
) -> fx.Graph | None:
    """Trace once; a module that fails becomes opaque, and the trace starts again.

    Each trace makes a module of the model opaque, or is the last one.
    """
    # A forward pass may register new modules. They are not of the model, in this or any trace.
    members = set(module.modules())
    while True:
        tracer = _LeafTracer(opaque, members)
        with restored_modules(module):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    graph = tracer.trace(module, concrete_args or None)
                tracer.mark_escaping()
                return graph
            except Exception:  # noqa: BLE001 - a forward pass may raise anything without values
                if tracer.failed is None:
                    return None
                opaque.add(tracer.failed)


class _LeafTracer(fx.Tracer):
    """Tracer that keeps some modules as leaves, and notes the module in which a trace failed.

    Modules that are not of the model, because a forward pass makes them, as in `nn.ReLU()(x)` or
    `self.layers[:3](x)`, are traced as if their code stood where they are called.

    Args:
        opaque: modules that are leaves.
        members: modules of the model.
    """

    def __init__(self, opaque: set[nn.Module], members: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque
        self.members = members
        self.failed: nn.Module | None = None
        self.proxies: list[tuple[weakref.ref[fx.Proxy], fx.Node]] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = super().proxy(node)
        if node.op.startswith("call"):
            self.proxies.append((weakref.ref(proxy), node))
        return proxy

    def mark_escaping(self) -> None:
        """Mark nodes whose proxies are alive. Called after the trace."""
        if any(proxy() is not None for proxy, _ in self.proxies):
            # A cycle of references keeps a proxy alive for a while, on some ranks and not on
            # others. All ranks must decide the same.
            gc.collect()
        for proxy, node in self.proxies:
            if proxy() is not None:
                node.meta[ESCAPES] = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            m in self.opaque
            or is_gpt2_conv1d(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if m not in self.members:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # For an opaque module the failure is that of the module around it.
            if m not in self.opaque:
                self.failed = self.failed or m  # the innermost module fails first
            raise
