"""Parameters in slices that are used directly: the user's code gets the full tensor.

      penalty = sum(p.abs().sum() for p in model.parameters())
      scores = F.linear(x, model.embedding.weight)

Every rank of a tensor group computes such a term alike, from the full tensor. So each has the full
gradient, and its slice of it is that of its shard: no sum is needed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mappings import gather_from_region
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.platform.torch_private.tensor_state import in_backward_pass, version
from shoal.strategies.tensor.lazy_gather import (
    METADATA_FUNCTIONS,
    LazyGatherTensor,
    shares_memory,
)

TENSOR_PROPERTIES = {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")
}
"""Getters of properties that read values. All other getters tell about the parameter itself."""
UNCHANGED_METHODS = {
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("stride", "is_contiguous", "get_device", "is_shared", "__repr__", "__deepcopy__"),
    *("__reduce_ex__", "__format__", "untyped_storage", "storage_offset", "data_ptr", "type"),
}
"""Names of methods that are called on the parameter itself."""


class GatherParameters(TorchFunctionMode):
    """Inside, each function of a parameter in slices gets the full tensor, gathered. Collective.

    Layers of Shoal's own read their slices as `to_local()`, which is no function of torch's. A
    write into `p.data` goes into the slices.

    Args:
        module: the module of this rank, in which parameters are looked up by name.
        axis: the tensor axis.
        own: ids of the parameters that this strategy has made.
        in_backward: active only where a backward pass computes a forward pass again.
    """

    def __init__(
        self, module: nn.Module, axis: Axis, own: Set[int], in_backward: bool = False
    ) -> None:
        super().__init__()
        self.module = module
        self.axis = axis
        self.own = own
        self.in_backward = in_backward
        self.exposed: list[tuple[Tensor, int, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.autograd.grad:
            _check_differentiated(args, options)
        if not _has_sliced_tensor(args, options) or not self._is_active():
            return func(*args, **options)
        name = getattr(func, "__name__", str(func))
        if _concerns_tensor_itself(func, name):
            return func(*args, **options)
        used = next(leaf for leaf in tree_leaves((args, options)) if is_tensor_sharded(leaf))
        # Of a buffer, or of `p.data`, a copy may be kept and put back, as recomputation does.
        keeps_slices = _is_write(name) or name in ("detach", "clone")
        if keeps_slices and not isinstance(used, nn.Parameter):
            return func(*args, **options)
        self._check_use(used, func, name)
        gathered: list[tuple[Tensor, DTensor]] = []

        def gather(tensor: DTensor) -> Tensor:
            if not is_tensor_sharded(tensor):
                return tensor
            full = gathered_parameter(tensor, self.axis)
            gathered.append((full, tensor))
            return full

        args, options = tree_map_only(DTensor, gather, (args, options))
        result = func(*args, **options)
        self.exposed += [
            (full, version(full), self._name(tensor))
            for full, tensor in gathered
            if any(shares_memory(leaf, full) for leaf in tree_leaves(result))
        ]
        return result

    def check_writes(self) -> None:
        """Check that nobody wrote into a gathered parameter. Called after the forward pass.

        Raises:
            StrategyRefused: a write, which the slices would not follow.
        """
        exposed, self.exposed = self.exposed, []
        for full, known_version, name in exposed:
            if version(full) != known_version:
                raise StrategyRefused(self._write_message(name))

    def _is_active(self) -> bool:
        if not in_backward_pass():
            return not self.in_backward
        return self.in_backward and torch.is_grad_enabled()

    def _check_use(self, used: Tensor, func: Any, name: str) -> None:
        """Check that a function may get the full tensor instead of `used`.

        Raises:
            StrategyRefused: its result would not be that of one device.
        """
        if func is torch.autograd.grad:
            raise StrategyRefused(
                f"tensor: compute_loss asks for the gradient of {self._name(used)}, of which each "
                "rank has a slice: torch.autograd.grad would find that of no slice. Use ddp or "
                f"single, or keep the layer whole: {self._whole_option(self._name(used))}."
            )
        if _is_write(name):
            raise StrategyRefused(self._write_message(self._name(used)))
        # FSDP replaces parameters by its own, and reduces the gradient of one as soon as the module
        # around it has been passed: that of another use could come too late.
        if any(id(parameter) not in self.own for parameter in self.module.parameters()):
            raise StrategyRefused(
                f"tensor: compute_loss uses {self._name(used)} outside of its layer, and zero has "
                "divided it over the data ranks too. Use ddp instead of zero1, zero2 or zero3, or "
                "leave out tensor."
            )

    def _write_message(self, name: str) -> str:
        return (
            f"tensor: compute_loss writes into {name}, of which each rank has a slice that would "
            "not follow. Write after the step, or keep the layer whole: "
            f"{self._whole_option(name)}."
        )

    def _name(self, used: Tensor) -> str:
        names = (name for name, each in self.module.named_parameters() if each is used)
        return next(names, f"a parameter {tuple(used.shape)}")

    def _whole_option(self, name: str) -> str:
        return f"tensor={self.axis.size},whole={name.rpartition('.')[0] or '...'}"


def _check_differentiated(args: Any, options: Any) -> None:
    """Check the arguments of torch.autograd.grad.

    Raises:
        StrategyRefused: one is a tensor in slices, which is not what the graph was recorded with.
    """
    if any(isinstance(leaf, LazyGatherTensor) for leaf in tree_leaves((args, options))):
        raise StrategyRefused(
            "tensor: compute_loss asks torch.autograd.grad for the gradient of, or with respect "
            "to, logits or tokens of which each rank has a slice. Leave out sequence, keep the "
            "layer that gives them whole by the strategy's option `whole`, or use ddp."
        )


def gathered_parameter(parameter: DTensor, axis: Axis) -> Tensor:
    """Return the full tensor of a parameter that is divided over `axis`. Collective.

    Differentiable: the gradient of this rank's slice is the slice of the gradient.
    """
    names = parameter.device_mesh.mesh_dim_names or ()
    dims = {
        name: placement.dim
        for name, placement in zip(names, parameter.placements, strict=True)
        if isinstance(placement, Shard)
    }
    assert set(dims) <= {"tensor"}, f"a parameter with shards along {sorted(dims)}"
    local = parameter.to_local()
    return gather_from_region(local, axis, dims["tensor"]) if dims else local


def is_tensor_sharded(tensor: Any) -> bool:
    """Return True for a shard along the tensor axis; FSDP's shards are along the data axis."""
    if not isinstance(tensor, DTensor):
        return False
    return "tensor" in (tensor.device_mesh.mesh_dim_names or ())


def _has_sliced_tensor(args: Any, options: Any) -> bool:
    """Look at arguments, and into lists among them. Called for each function of torch's."""
    for arg in (*args, *options.values()) if options else args:
        if isinstance(arg, DTensor):
            if is_tensor_sharded(arg):
                return True
        elif isinstance(arg, (list, tuple)) and _has_sliced_item(arg):
            return True
    return False


def _has_sliced_item(items: Sequence[Any]) -> bool:
    """Look at the types first: `torch.tensor` gets lists of thousands of numbers."""
    has_distributed = any(issubclass(kind, DTensor) for kind in set(map(type, items)))
    return has_distributed and any(is_tensor_sharded(item) for item in items)


def _concerns_tensor_itself(func: Any, name: str) -> bool:
    if func in METADATA_FUNCTIONS or name in UNCHANGED_METHODS:
        return True
    is_property = name in ("__get__", "__set__", "__delete__")
    return is_property and func not in TENSOR_PROPERTIES


def _is_write(name: str) -> bool:
    is_operator = name.startswith("__i") and name.endswith("__")
    if is_operator or name in ("__setitem__", "set_data"):
        return name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.endswith("__")
