"""Parameters in slices that are used directly, outside of their layers: an error.

      penalty = sum(p.abs().sum() for p in model.parameters())
      scores = F.linear(x, model.embedding.weight)

On each rank they would be the slice. Layers of Shoal's own read their slices as `to_local()`, which
is no function of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mappings import gather_from_region
from shoal.errors import StrategyRefused
from shoal.platform.tensors import is_write
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.tensor_state import in_backward_pass
from shoal.strategies.tensor.lazy_gather import METADATA_FUNCTIONS, LazyGatherTensor

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


class RefuseSlices(TorchFunctionMode):
    """Inside, no function may take a parameter in slices.

    A backward pass that computes layers again does so as the forward pass did.

    Args:
        module: the module of this rank, in which parameters are looked up by name.
        axis: the tensor axis.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.module = module
        self.axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.autograd.grad:
            _check_differentiated(args, options)
        if _has_sliced_tensor(args, options) and not in_backward_pass():
            self._check_use(func, args, options)
        return func(*args, **options)

    def _check_use(self, func: Any, args: Any, options: Any) -> None:
        """Check that a function of a parameter in slices looks at no values of it.

        Raises: StrategyRefused: its result would be that of a slice.
        """
        name = getattr(func, "__name__", str(func))
        if _concerns_tensor_itself(func, name):
            return
        used = next(leaf for leaf in tree_leaves((args, options)) if is_tensor_sharded(leaf))
        # Of a buffer, or of `p.data`, a copy may be kept and put back, as recomputation does.
        keeps_slices = is_write(name) or name in ("set_data", "detach", "clone")
        if keeps_slices and not isinstance(used, nn.Parameter):
            return
        names = (name for name, each in self.module.named_parameters() if each is used)
        path = next(names, "values of a parameter")
        whole = f"tensor={self.axis.size},whole={path.rpartition('.')[0] or '...'}"
        raise StrategyRefused(
            f"tensor: compute_loss uses {path} outside of its layer, in {name}, and each rank has "
            f"a slice of it. Keep the layer whole: {whole}; or use ddp."
        )


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
