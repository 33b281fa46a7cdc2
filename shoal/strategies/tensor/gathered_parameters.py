"""Parameters in slices that are used directly: the user's code gets the full tensor.

      penalty = sum(p.abs().sum() for p in model.parameters())
      scores = F.linear(x, model.embedding.weight)

Every rank of a tensor group computes such a term alike, from the full tensor. So each has the full
gradient, and its slice of it is that of its shard: no sum is needed.
"""

from __future__ import annotations

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
from shoal.strategies.tensor.lazy_gather import METADATA_FUNCTIONS

TENSOR_PROPERTIES = {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")
}
"""Getters of properties that read values. All other getters tell about the parameter itself."""
READ_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
UNCHANGED_METHODS = {
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("stride", "is_contiguous", "get_device", "is_shared", "__repr__", "__deepcopy__", "__format__"),
    *("__reduce_ex__", "untyped_storage", "storage_offset", "data_ptr", "type", "is_inference"),
}
"""Names of methods that are called on the parameter itself."""


class GatherParameters(TorchFunctionMode):
    """Inside, each function of a parameter in slices gets the full tensor, gathered. Collective.

    Layers of Shoal's own read their slices as `to_local()`, which is no function of torch's.

    Args:
        axis: the tensor axis.
        names: parameter -> its name, for errors.
        in_backward: active only where a backward pass computes a forward pass again.
    """

    def __init__(self, axis: Axis, names: dict[int, str], in_backward: bool = False) -> None:
        super().__init__()
        self.axis = axis
        self.names = names
        self.in_backward = in_backward
        self.exposed: list[tuple[Tensor, int, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not _has_sliced_parameter(args, options) or not self._is_active():
            return func(*args, **options)
        name = getattr(func, "__name__", str(func))
        if _concerns_parameter_itself(func, name):
            return func(*args, **options)
        self._check_reads(func, name, args, options)
        gathered: list[tuple[Tensor, str]] = []

        def gather(parameter: DTensor) -> Tensor:
            if not _is_sliced_parameter(parameter):
                return parameter
            full = gathered_parameter(parameter, self.axis)
            gathered.append((full, self._name(parameter)))
            return full

        args, options = tree_map_only(DTensor, gather, (args, options))
        result = func(*args, **options)
        self.exposed += [
            (full, version(full), parameter_name)
            for full, parameter_name in gathered
            if any(_shares_memory(leaf, full) for leaf in tree_leaves(result))
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

    def _check_reads(self, func: Any, name: str, args: Any, options: Any) -> None:
        leaves = tree_leaves((args, options))
        used = next(leaf for leaf in leaves if _is_sliced_parameter(leaf))
        if func is torch.autograd.grad:
            raise StrategyRefused(
                f"tensor: compute_loss asks for the gradient of {self._name(used)}, of which each "
                "rank has a slice: torch.autograd.grad would find that of no slice. Use ddp or "
                f"single, or keep the layer whole: {self._whole_option(used)}."
            )
        is_write = name.endswith("_") and not name.endswith("__")
        if is_write or name in ("__setitem__", "set_data") or _is_in_place_operator(name):
            raise StrategyRefused(self._write_message(self._name(used)))
        if func is READ_DATA:
            raise StrategyRefused(
                f"tensor: compute_loss reads the .data of {self._name(used)}, of which each rank "
                "has a slice: a write into it would be lost. Read it by .detach(), or keep the "
                f"layer whole: {self._whole_option(used)}."
            )

    def _write_message(self, name: str) -> str:
        module_name = name.rpartition(".")[0] or name
        return (
            f"tensor: compute_loss writes into {name}, of which each rank has a slice that would "
            "not follow. Write after the step, or keep the layer whole: "
            f"tensor={self.axis.size},whole={module_name}."
        )

    def _name(self, parameter: Tensor) -> str:
        return self.names.get(id(parameter), "a parameter")

    def _whole_option(self, parameter: Tensor) -> str:
        module_name = self._name(parameter).rpartition(".")[0] or "..."
        return f"tensor={self.axis.size},whole={module_name}"


def gathered_parameter(parameter: DTensor, axis: Axis) -> Tensor:
    """Return the full tensor of a parameter that is divided over `axis`. Collective.

    Differentiable: the gradient of this rank's slice is the slice of the gradient.

    Raises:
        StrategyRefused: it is divided over the data axis as well.
    """
    names = parameter.device_mesh.mesh_dim_names or ()
    dims = {}
    for name, placement in zip(names, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            dims[name] = placement.dim
    if set(dims) - {"tensor"}:
        raise StrategyRefused(
            f"tensor: compute_loss uses a parameter {tuple(parameter.shape)} that is divided over "
            "the data ranks too, outside of the module that owns it. Use ddp or zero1 instead of "
            "zero2 or zero3, or keep its layer whole: see the option `whole`."
        )
    local = parameter.to_local()
    return gather_from_region(local, axis, dims["tensor"]) if dims else local


def is_tensor_sharded(tensor: Any) -> bool:
    """Return True for a shard along the tensor axis; FSDP's shards are along the data axis."""
    if not isinstance(tensor, DTensor):
        return False
    return "tensor" in (tensor.device_mesh.mesh_dim_names or ())


def _is_sliced_parameter(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and isinstance(leaf, nn.Parameter) and is_tensor_sharded(leaf)


def _has_sliced_parameter(args: Any, options: Any) -> bool:
    """Look at arguments, and into lists among them. Called for each function of torch's."""
    for arg in (*args, *options.values()) if options else args:
        if isinstance(arg, DTensor):
            if _is_sliced_parameter(arg):
                return True
        elif isinstance(arg, (list, tuple)) and any(_is_sliced_parameter(item) for item in arg):
            return True
    return False


def _concerns_parameter_itself(func: Any, name: str) -> bool:
    if func in METADATA_FUNCTIONS or name in UNCHANGED_METHODS:
        return True
    is_property = name in ("__get__", "__set__", "__delete__")
    return is_property and func is not READ_DATA and func not in TENSOR_PROPERTIES


def _is_in_place_operator(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__")


def _shares_memory(leaf: Any, full: Tensor) -> bool:
    is_plain = type(leaf) is Tensor and leaf.layout is torch.strided
    return is_plain and leaf.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
