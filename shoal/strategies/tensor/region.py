"""Where cut layers may run: inside the forward pass of the module that the plan has looked at.

x ──> [ column ] ── act ── [ row ] ──> total          a slice of the hidden units on each rank;
copied once                                           outside of the region nobody sees it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.tensor_state import in_backward_pass, version
from shoal.strategies.tensor.column_input import ColumnInput, to_column_input


class Region:
    """Stands in for the `forward` of a module with cut layers somewhere below it.

    Args: name: of the module; axis: that its layers are cut along.
    """

    def __init__(self, module: nn.Module, name: str, axis: Axis) -> None:
        self.module, self.name, self.axis = module, name, axis
        self.depth = 0
        self.copies: list[tuple[Tensor, tuple[int, bool], ColumnInput]] = []

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        self.depth += 1
        try:
            return type(self.module).forward(self.module, *inputs, **options)
        finally:
            self.depth -= 1
            self.copies = self.copies if self.depth else []

    def entered(self, x: Tensor) -> ColumnInput:
        """`x` for a column layer. Layers with one input share it: their gradients need one sum."""
        if (
            not self.depth and in_backward_pass()
        ):  # a checkpoint computes the layer again, and nothing else
            return to_column_input(x, self.axis)
        if not self.depth:
            raise UsageError(
                f"a layer of {self.name or 'the model'} that is cut along the tensor axis was "
                "called from outside of "
                "it, where its slice of the output would be taken for the whole. Call "
                f"{self.name or 'the model'}, or "
                "keep the layer whole: see the strategy's option `whole`."
            )
        if x.is_inference():  # nobody counts what is written into it, and there is no backward pass
            return to_column_input(x, self.axis)
        state = (version(x), torch.is_grad_enabled())
        for source, seen, made in self.copies:
            if source is x and seen == state:
                return made
        made = to_column_input(x, self.axis)
        # A region may be large, and what was gathered for one of its pairs is not to live until its
        # end.
        self.copies = [*self.copies[-1:], (x, state, made)]
        return made


def local_shard(tensor: Tensor | None) -> Any:
    """This rank's slice, differentiable; what is whole stays as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_parameter(
    module: nn.Module, key: str, dim: int, mesh: Mesh, made: dict[int, nn.Parameter]
) -> None:
    """Keep this rank's slice of a parameter or buffer, as a DTensor. One that is shared by modules
    is cut once.

    Args: made: cut parameters by the id of the whole ones.
    """
    whole = getattr(module, key)
    if whole is None:
        return
    if key in own_buffers(module):
        setattr(module, key, sliced(whole, dim, mesh))
        return
    if id(whole) not in made:
        made[id(whole)] = nn.Parameter(
            sliced(whole.detach(), dim, mesh), requires_grad=whole.requires_grad
        )
    setattr(module, key, made[id(whole)])


def sliced(whole: Tensor, dim: int, mesh: Mesh) -> DTensor:
    """This rank's slice of what all ranks hold, in memory of its own; no communication."""
    size = whole.shape[dim] // mesh.tensor.size
    own = whole.narrow(dim, mesh.tensor.rank * size, size).clone(
        memory_format=torch.contiguous_format
    )
    return DTensor.from_local(own, mesh.device_mesh["tensor"], [Shard(dim)], run_check=False)
