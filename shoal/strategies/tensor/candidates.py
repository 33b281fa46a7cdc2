"""Modules that a plan may divide over ranks, and the reasons against the others.

A rank that holds a shard of a layer computes a shard of its output. Code of the user must never
take this shard for the full tensor. So a layer is no candidate

    - where a hook would see the shard, on the layer or on a module around a part of a pair;
    - where a parameter has hooks of its own: a shard is another parameter, without these hooks;
    - where the layer or its parameters are used in several places;
    - where the stages of a pipeline run it in parts, or in several ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn

from shoal.platform.torch_private.module_state import hooks_of, own_parameters
from shoal.platform.torch_private.tensor_state import has_hooks
from shoal.strategies.full_model import FullModel

LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Candidates:
    """Modules of a model that are not yet planned and may be divided.

    Args:
        model: all of the model. It is not changed.
        degree: T, the number of ranks of a tensor group.
        excluded: modules that no plan may divide.
        full_model: how the model is divided into pipeline stages; None for one stage.

    Attributes:
        by_name: every module of the model, by each of its names.
        remaining: the modules that may still be divided, with their names.
        shared: modules that are used in several places, or whose parameters are.
        reasons: module name -> why it stays replicated. Plans add their reasons here.
    """

    def __init__(
        self,
        model: nn.Module,
        degree: int,
        excluded: Iterable[nn.Module],
        full_model: FullModel | None = None,
    ) -> None:
        self.degree = degree
        self.full_model = full_model
        self.by_name = dict(model.named_modules(remove_duplicate=False))
        excluded_set = set(excluded)
        self.remaining = {m: name for name, m in model.named_modules() if m not in excluded_set}
        self.shared = self._shared_modules(model)
        self.reasons: dict[str, str] = {}
        self._exclude_hooked_parameters()
        if full_model is not None:
            self._exclude_split_by_stages(full_model)

    def _shared_modules(self, model: nn.Module) -> set[nn.Module]:
        """Return modules with several names, and those with a parameter of several modules."""
        uses = Counter(
            id(p) for m in model.modules() for p in nn.Module.parameters(m, recurse=False)
        )
        shared = {
            module
            for module in self.remaining
            if any(
                uses[id(parameter)] > 1 for parameter in nn.Module.parameters(module, recurse=False)
            )
        }
        # Without remove_duplicate=False each module would be listed under its first name only.
        paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        return shared | {module for module, count in paths.items() if count > 1}

    def _exclude_hooked_parameters(self) -> None:
        for module, name in list(self.remaining.items()):
            named = module.named_parameters(recurse=False)
            key = next((key for key, parameter in named if has_hooks(parameter)), None)
            if key is not None:
                self.reasons[name] = f"its {key} has hooks, which would not know of a slice"
                del self.remaining[module]

    def _exclude_split_by_stages(self, full_model: FullModel) -> None:
        """Exclude modules that the stages of a pipeline run in parts or in several ways.

        A plan for such a module would have to know what surrounds it in every stage.
        """
        model = full_model.model
        directly_read = {id(model.get_parameter(name)) for name in full_model.directly_read}
        for module, name in list(self.remaining.items()):
            # Code that runs in parts, in several stages: the plan says so where it matters.
            is_whole = full_model.runs_whole(name)
            is_read = any(
                id(p) in directly_read for p in nn.Module.parameters(module, recurse=False)
            )
            if is_whole and is_read:
                self.reasons[name] = "code around the blocks reads its parameters"
            if is_read or not is_whole:
                del self.remaining[module]

    def remove_planned(self, names: Iterable[str]) -> None:
        """Remove modules that a plan divides, with all modules inside them."""
        planned = {module for name in names for module in self.by_name[name].modules()}
        self.remaining = {m: name for m, name in self.remaining.items() if m not in planned}

    def may_shard(
        self, module: nn.Module, kinds: tuple[type[nn.Module], ...], may_be_shared: bool = False
    ) -> bool:
        """Return True if the module is exactly of one of `kinds`, used once and without hooks.

        A subclass is refused, and so is a module whose `forward` was replaced: both may compute
        something else. GPT-2's Conv1D counts as nn.Linear.
        """
        is_known = type(module) in kinds or (nn.Linear in kinds and is_gpt2_conv1d(module))
        if not is_known or "forward" in vars(module):
            return False
        is_used_once = may_be_shared or module not in self.shared
        return module in self.remaining and is_used_once and not has_module_hooks(module)


def is_gpt2_conv1d(module: Any) -> bool:
    """Return True for Hugging Face's `Conv1D`: x @ weight + bias, with a weight (in, out).

    The library need not be installed, so the class is known by its name and its shapes.
    """
    parameters = own_parameters(module)
    if type(module).__name__ != "Conv1D" or set(parameters) != {"weight", "bias"}:
        return False
    weight, bias = parameters["weight"], parameters["bias"]
    if not (isinstance(weight, Tensor) and isinstance(bias, Tensor) and weight.dim() == 2):
        return False
    return bool(weight.shape[1] == len(bias) == getattr(module, "nf", None))


def width_in(module: Any) -> int:
    """Return the number of inputs of a linear layer, or of input channels of a convolution."""
    if is_gpt2_conv1d(module):
        return int(module.weight.shape[0])
    return int(module.in_features if isinstance(module, nn.Linear) else module.in_channels)


def width_out(module: Any) -> int:
    """Return the number of outputs of a linear layer, or of output channels of a convolution."""
    if is_gpt2_conv1d(module):
        return int(module.weight.shape[1])
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)


def has_module_hooks(module: nn.Module) -> bool:
    """Return True if hooks see inputs or outputs of the module, forward or backward."""
    return bool(hooks_of(module, "forward", "forward_pre", "backward", "backward_pre"))


def find_hooks_inside(module: nn.Module) -> str | None:
    """Return the name of a module with hooks below `module`, None if there is none."""
    inner_modules = module.named_modules()
    return next((name for name, m in inner_modules if name and has_module_hooks(m)), None)


def modules_on_border(nodes: Iterable[fx.Node]) -> set[str]:
    """Return the modules that contain some of the nodes, but not all: a shard crosses the border of
    each.
    """
    containers = [_containers(node) for node in nodes]
    paths = set[str]().union(*containers)
    return {path for path in paths if not all(path in others for others in containers)}


def _containers(node: fx.Node) -> set[str]:
    """Return the modules in whose forward functions the tracer has recorded the node."""
    words = str(node.target).split(".") if node.op == "call_module" else []
    outer = {".".join(words[:count]) for count in range(1, len(words))}
    return outer | {path for path, _ in node.meta.get("nn_module_stack", {}).values()}


def callers_of(node: fx.Node) -> set[str] | None:
    """Return the modules in whose forward functions the node was recorded; None if unknown.

    The root of the graph is not among them, and a module that is called is not its own caller.
    """
    stack = node.meta.get("nn_module_stack")
    if stack is None:
        return None
    own = {str(node.target)} if node.op == "call_module" else set()
    return {path for path, _ in stack.values()} - own
