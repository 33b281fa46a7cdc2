"""Who looks at what flows between modules: hooks, which would see a slice and take it for the
whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx, nn

from shoal.platform.torch_private.module_state import (
    forward_pre_hooks,
    has_backward_hooks,
    has_forward_hooks,
)
from shoal.platform.torch_private.tensor_state import has_hooks


def hooked(module: nn.Module) -> bool:
    """Whether hooks see, or change, what goes in or out of a module, forward or backward."""
    return (
        has_forward_hooks(module) or bool(forward_pre_hooks(module)) or has_backward_hooks(module)
    )


def hooked_inside(module: nn.Module) -> str | None:
    """The name of a module with hooks somewhere in `module`, not itself."""
    return next((name for name, m in module.named_modules() if name and hooked(m)), None)


def hooked_between(
    region: str, names: Iterable[str], by_name: Mapping[str, nn.Module]
) -> str | None:
    """The name of a module with hooks that lies in `region`, and that one of `names` lies in."""
    depth = len(region.split(".")) if region else 0
    words = [name.split(".") for name in names]
    between = {".".join(path[:count]) for path in words for count in range(depth + 1, len(path))}
    return next((name for name in sorted(between) if hooked(by_name[name])), None)


def hooked_boundary(
    nodes: Iterable[fx.Node], prefix: str, by_name: Mapping[str, nn.Module]
) -> str | None:
    """The name of a module with hooks that some of the nodes lie in, and some do not: slices come
    by.

    Args: prefix: of names in the graph.
    """
    paths = [_containers(node) for node in nodes]
    parting = {
        path for path in set[str]().union(*paths) if not all(path in others for others in paths)
    }
    return next((path for path in sorted(parting) if hooked(by_name[prefix + path])), None)


def _containers(node: fx.Node) -> set[str]:
    """Modules in whose forward functions a node came into being, as the tracer has noted them."""
    words = str(node.target).split(".") if node.op == "call_module" else []
    outer = {".".join(words[:count]) for count in range(1, len(words))}
    return outer | {path for path, _ in node.meta.get("nn_module_stack", {}).values()}


def hooked_parameter(module: nn.Module) -> str | None:
    """The name of a parameter with hooks of its own: a slice is another parameter, of which
    they would not know.
    """
    own = module.named_parameters(recurse=False)
    return next((name for name, p in own if has_hooks(p)), None)
