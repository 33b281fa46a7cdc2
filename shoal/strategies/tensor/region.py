"""Regions: the forward passes inside which divided layers may run, and how inputs enter them.

x ──> [ column ] ── act ── [ row ] ──> sum over ranks     each rank has a shard of the hidden
copied once                                               units; nothing outside sees the shard

Between regions, x is replicated, or sequence parallel (`sequence.py`):

      row layer ─┐                                   ┌─ column layer
                 │  all-reduce      replicated       │             a sum forward, a sum backward
                 │  reduce-scatter  slices of tokens │  all-gather  the same bytes, in two halves

A gathered x is not kept for the backward pass. The gradient of a weight needs it again, so it is
gathered again.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import (
    all_gather_dim,
    conjugate,
    copy_to_region,
    reduce_from_region,
    reduce_scatter_dim,
)
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.tensors import in_memory_order
from shoal.platform.torch_private.module_state import hooks_of
from shoal.platform.torch_private.tensor_state import (
    in_backward_pass,
    in_function_transform,
    version,
)
from shoal.strategies.grad_checks import is_of_script
from shoal.strategies.tensor.lazy_gather import check_first_derivative
from shoal.strategies.tensor.sequence import SequenceParallelTensor


class Region:
    """Replacement of the `forward` of a module that contains divided layers.

    Args:
        module: the module.
        name: its name in the model, for errors.
        axis: the tensor axis.

    Attributes:
        depth: forward passes of the module that run now; 0 outside.
        entered: the last inputs of column layers: tensor, its state, and what was made of it.
        slice_hooks: (module, kinds, columns): hooks of a module that would see slices of columns.
    """

    def __init__(self, module: nn.Module, name: str, axis: Axis) -> None:
        self.module = module
        self.name = name
        self.axis = axis
        self.depth = 0
        self.entered: list[tuple[Tensor, tuple[int, bool], ColumnInput]] = []
        self.slice_hooks: list[tuple[nn.Module, tuple[str, ...], list[nn.Module]]] = []

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        with self:
            return type(self.module).forward(self.module, *inputs, **options)

    def __enter__(self) -> None:
        """Begin a forward pass of the module.

        Raises: UsageError: a hook that would see slices was registered after they were made.
        """
        if not self.depth:
            for module, kinds, columns in self.slice_hooks:
                if any(map(is_of_script, hooks_of(module, *kinds))):
                    self._refuse_hook(module, columns)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.entered = []

    def check_inside(self) -> None:
        """Check that a layer runs in the forward pass of the region.

        Raises: UsageError: the layer was called from outside of the region.
        """
        if not self.depth and not in_backward_pass():
            raise UsageError(
                f"a layer of {self.name or 'the model'} that is cut along the tensor axis was "
                "called from outside of it, where its slice of the output would be taken for the "
                f"whole. Call {self.name or 'the model'}, or keep the layer whole: see the "
                "strategy's option `whole`."
            )

    def guard(self, columns: list[nn.Module], between: Iterable[nn.Module], row: nn.Module) -> None:
        """Refuse hooks from now on that would take a slice for the whole."""
        kinds = ("forward", "backward", "backward_pre")  # of a column, whose input is whole
        self.slice_hooks += [(column, kinds, columns) for column in columns]
        self.slice_hooks += [(module, (*kinds, "forward_pre"), columns) for module in between]
        self.slice_hooks.append((row, ("forward_pre", "backward"), columns))

    def _refuse_hook(self, module: nn.Module, columns: list[nn.Module]) -> None:
        names = {id(m): name for name, m in self.module.named_modules(prefix=self.name)}
        whole = "+".join(names[id(column)] for column in columns)
        raise UsageError(
            f"a hook was registered on {names[id(module)]} after run.prepare. Each rank has a "
            "slice of what goes by there along the tensor axis, which the hook would take for the "
            "whole. Register it before run.prepare, which leaves what it sees whole, or keep the "
            f"layer whole: tensor={self.axis.size},whole={whole}."
        )

    def enter(self, x: Tensor) -> ColumnInput:
        """Return `x` as the input of a column layer.

        Layers with the same input share the result: then their gradients need one sum.

        Raises: UsageError: the layer was called from outside of the region.
        """
        self.check_inside()
        # Activation checkpointing computes the layer again, alone. A tensor of inference mode
        # counts no writes, and there is no backward pass.
        if not self.depth or x.is_inference():
            return to_column_input(x, self.axis)
        state = (version(x), torch.is_grad_enabled())
        for source, source_state, column_input in self.entered:
            if source is x and source_state == state:
                return column_input
        column_input = to_column_input(x, self.axis)
        # Only the last two are kept: a region may be large, and a gathered input of one of its
        # pairs must not live until its end.
        self.entered = [*self.entered[-1:], (x, state, column_input)]
        return column_input


class ColumnInput(NamedTuple):
    """Input of column layers.

    Attributes:
        full: (..., in), the full tensor. Each rank computes a part of its gradient.
        local: the tokens that `full` was gathered from; None if it was replicated.
        regather: shared by all layers with this input; None if it was replicated.
    """

    full: Tensor
    local: Tensor | None = None
    regather: RegatherInBackward | None = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's shard of the outputs, (..., out/T).

        Args:
            weight: (out/T, in), this rank's shard.
            bias: (out/T,), this rank's shard.
        """
        if self.local is None or self.regather is None:
            return F.linear(self.full, weight, bias)
        if torch.is_autocast_enabled(weight.device.type):  # as F.linear would
            weight = weight.to(self.full.dtype)
            bias = None if bias is None else bias.to(self.full.dtype)
        output: Tensor = _LinearOfGathered.apply(self.full, self.local, weight, bias, self.regather)
        return output


def to_column_input(x: Tensor, axis: Axis) -> ColumnInput:
    """Return `x` as the input of column layers. Collective if it is sequence parallel."""
    if not isinstance(x, SequenceParallelTensor):
        return ColumnInput(copy_to_region(x, axis))
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(device_type))  # before it is sent
    assert isinstance(x, SequenceParallelTensor)
    x.reattach_local()
    if x.written:
        return ColumnInput(copy_to_region(x.full_tensor, axis))
    regather = RegatherInBackward(x)
    # Each rank has a part of the gradient.
    full = conjugate(x.local, regather.gather, lambda g: reduce_scatter_dim(g, axis, regather.dim))
    return ColumnInput(full, x.local, regather)


def sum_of_ranks(partial: Tensor, axis: Axis, shard_dim: int | None) -> Tensor:
    """Return the sum over ranks of `partial`. Collective.

    Args: shard_dim: the sequence dimension for a sequence parallel sum. The sum is replicated if
        this is None, or if `partial` has no dimensions for both samples and tokens.
    """
    if shard_dim is None or partial.dim() < 3:
        return reduce_from_region(partial, axis)
    dim, length = shard_dim % partial.dim(), partial.shape[shard_dim]
    local = conjugate(
        partial,
        lambda x: reduce_scatter_dim(x, axis, dim),
        lambda x: all_gather_dim(x, axis, dim, length),
    )
    return SequenceParallelTensor.from_local(local, axis, dim, length)


def local_shard(tensor: Tensor | None) -> Any:
    """Return this rank's shard of a parameter or buffer of a divided layer, differentiable.

    None, of a layer without one, is returned as it is.

    Raises: StrategyRefused: somebody has put a full tensor in its place.
    """
    if tensor is None or isinstance(tensor, DTensor):
        return local_part(tensor)
    raise StrategyRefused(
        "tensor: a layer whose parameters lie in slices was given a full one "
        f"{tuple(tensor.shape)} instead, by torch.func.functional_call for example. Call the model "
        "itself, keep the layer whole by the strategy's option `whole`, or use ddp."
    )


def local_part(tensor: Tensor | None) -> Any:
    """Return this rank's shard, differentiable; a replicated tensor, or None, as it is.

    Raises: StrategyRefused: a transform of torch.func is active, which no collective goes through.
    """
    if in_function_transform():
        raise StrategyRefused(
            "tensor: compute_loss calls a layer in slices inside of a transform of torch.func "
            "(vmap, grad, jvp), which does not go through the sum over ranks. Keep the model whole "
            "by the strategy's option `whole`, or use ddp."
        )
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class RegatherInBackward:
    """Gathers an input, and once more in the backward pass for all layers that took it.

    Attributes:
        axis, dim, length, memory_order: how the full tensor lies on the ranks and in memory.
        readers: layers whose weights need the input for their gradients.
        remaining: readers that have not yet asked in this backward pass.
    """

    def __init__(self, x: SequenceParallelTensor) -> None:
        self.axis, self.dim = x.axis, x.shard_dim
        self.length, self.memory_order = x.shape[x.shard_dim], x.memory_order
        self.readers = 0
        self.remaining = 0
        self.full: Tensor | None = None

    def gather(self, local: Tensor) -> Tensor:
        """Return the full tensor, without a gradient. Collective."""
        full = all_gather_dim(local, self.axis, self.dim, self.length)
        return in_memory_order(full, self.memory_order)

    def gathered(self, local: Tensor) -> Tensor:
        """Return the full tensor, and free it after the last reader. Collective for the first."""
        full = self.gather(local) if self.full is None else self.full
        self.remaining = (self.remaining or self.readers) - 1
        self.full = full if self.remaining else None
        return full


class _LinearOfGathered(torch.autograd.Function):
    """F.linear that saves this rank's tokens of its input instead of the gathered input."""

    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor,
        local: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        regather: RegatherInBackward,
    ) -> Tensor:
        ctx.save_for_backward(local, weight)
        ctx.regather = regather
        regather.readers += weight.requires_grad
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        check_first_derivative()
        local, weight = ctx.saved_tensors
        needs_full, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        weight_gradient = None
        if needs_weight:
            full = ctx.regather.gathered(local)
            weight_gradient = rows.t() @ full.flatten(0, -2)
        full_gradient = gradient @ weight if needs_full else None
        bias_gradient = rows.sum(0) if needs_bias else None
        return full_gradient, None, weight_gradient, bias_gradient, None
