"""A tensor of which each rank has a slice, and which becomes whole where somebody looks at it.

      rank 0     own [ a b . . ] ─┐                              what knows slices runs on `own`, and sends little;
                                  ├─> whole [ a b c d ]          anything else gets the whole, gathered once
      rank 1     own [ . . c d ] ─┘

It has the shape of the whole, and computes like the whole. Who writes into it writes into the
gathered whole, and that is what it is from then on. The slices of others that share its memory
would not follow, so that is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import all_gather_dim, gather_from_region, local_slice
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import IS_VIEW, schema_of, version

IN_PLACE_OPS = (
    "tensor: {what} writes into a tensor that lies in slices, and others have views of it that "
    "would not follow. Write "
    "a new tensor, x = x / y for x.div_(y) say, or take a clone() first; or keep the layer that "
    "gives it whole: see "
    "the strategy's option `whole`."
)


class ViewGroup:
    """What tensors share that are views of each other.

    Attributes: members: the tensors. handed_out: gathered wholes that were written into, or that
        somebody has plain views of, each with its version
            when it was gathered.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[LazyGatherTensor]] = []
        self.handed_out: list[tuple[Tensor, int]] = []

    def join(self, member: LazyGatherTensor) -> None:
        self.members = [
            *(other for other in self.members if other() is not None),
            weakref.ref(member),
        ]

    def check_same_on_all_ranks(self, of: LazyGatherTensor, what: str) -> None:
        """Raises StrategyRefused: a write that not all tensors of this memory would see."""
        written = [whole for whole, known in self.handed_out if version(whole) != known]
        others = any(member() is not None and member() is not of for member in self.members)
        if written and (others or any(whole is not of._whole for whole in written)):
            raise StrategyRefused(IN_PLACE_OPS.format(what=what))


class LazyGatherTensor(Tensor):
    """A tensor of which this rank has `own`, its slice along dimension `along`, differentiable.

    Attributes: known: functions that run on slices; what gives NotImplemented gets the whole after
    all."""

    known: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    local: Tensor
    axis: Axis
    shard_dim: int
    memory: ViewGroup
    _whole: Tensor | None
    _gathered_version: int

    @classmethod
    def from_local(
        cls, own: Tensor, axis: Axis, along: int, memory: ViewGroup | None = None
    ) -> Self:
        """Args: memory: of the tensor that `own` is a view of a slice of, if it is."""
        made: Any = _FromLocal.apply(own, cls, axis, along)
        made.local, made.axis, made.shard_dim, made._whole = own, axis, along, None
        made.memory = ViewGroup() if memory is None else memory
        made.memory.join(made)
        found: Self = made
        return found

    def like(self, own: Tensor) -> Self:
        """What a function of slices gave, of this tensor's."""
        if own is self.local:
            return self
        same = own.untyped_storage().data_ptr() == self.local.untyped_storage().data_ptr()
        along = own.dim() - (self.local.dim() - self.shard_dim)
        return type(self).from_local(own, self.axis, along, self.memory if same else None)

    @property
    def full_tensor(self) -> Tensor:
        """All of it, on every rank. Collective."""
        if self._whole is None:
            # With its graph even where nobody wants one now: who looks next may. And with a count
            # of what is written.
            with torch.inference_mode(False), torch.set_grad_enabled(self.local.requires_grad):
                self._whole = gather_from_region(self.local, self.axis, self.shard_dim)
            self._gathered_version = version(self._whole)
        return self._whole

    @property
    def written(self) -> bool:
        """Whether the whole is no longer what the slices are."""
        return self._whole is not None and version(self._whole) != self._gathered_version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in METADATA_OPS:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        items = [
            leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, LazyGatherTensor)
        ]
        for item in items:
            item._follow()
            item.memory.check_same_on_all_ranks(item, "somebody")
        first = args[0] if args else None
        if isinstance(first, LazyGatherTensor) and func in first.known and not first.written:
            found = first.known[func](*args, **options)
            if found is not NotImplemented:
                return found
        result = func(*_full_tensors(args), **_full_tensors(options))
        for item in items:
            item._track_views(result, getattr(func, "__name__", str(func)))
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if schema_of(func).is_mutable:  # below the level where it would be noticed
            raise StrategyRefused(IN_PLACE_OPS.format(what=func))
        return func(*_full_tensors(args), **_full_tensors(kwargs or {}))

    def _follow(self) -> None:
        """Where a Function of somebody's own, a checkpoint say, gave this wrapper: the slices
        come from it.
        """
        with DisableTorchFunctionSubclass():
            cut_off = self.requires_grad and not self.local.requires_grad
        if not cut_off:
            return
        if self.written:
            raise StrategyRefused(IN_PLACE_OPS.format(what="an autograd.Function"))
        with torch.inference_mode(False), torch.enable_grad():
            self.local, self._whole = _ToLocal.apply(self, self.local), None

    def _track_views(self, result: Any, what: str) -> None:
        whole = self.full_tensor
        shared = any(
            isinstance(leaf, Tensor) and _shares(leaf, whole) for leaf in tree_leaves(result)
        )
        if (self.written or shared) and all(
            whole is not other for other, _ in self.memory.handed_out
        ):
            self.memory.handed_out.append((whole, self._gathered_version))
        self.memory.check_same_on_all_ranks(self, what)


def _full_tensors(nest: Any) -> Any:
    return tree_map_only(LazyGatherTensor, lambda item: item.full_tensor, nest)


def _shares(leaf: Tensor, whole: Tensor) -> bool:
    plain = type(leaf) is Tensor and leaf.layout is torch.strided
    return plain and leaf.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


class _FromLocal(torch.autograd.Function):
    """The wrapper in autograd's eyes: who takes it as a whole, a Function of somebody's own,
    gives a whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, kind: type[LazyGatherTensor], axis: Axis, along: int) -> Any:
        ctx.axis, ctx.shard_dim = axis, along
        shape = (*own.shape[:along], own.shape[along] * axis.size, *own.shape[along + 1 :])
        return make_wrapper_subclass(kind, shape, dtype=own.dtype, device=own.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return local_slice(gradient, ctx.axis, ctx.shard_dim).contiguous(), None, None, None


class _ToLocal(torch.autograd.Function):
    """The slices of a wrapper."""

    @staticmethod
    def forward(ctx: Any, wrapper: LazyGatherTensor, own: Tensor) -> Tensor:
        ctx.axis, ctx.shard_dim, ctx.length = (
            wrapper.axis,
            wrapper.shard_dim,
            wrapper.shape[wrapper.shard_dim],
        )
        return own.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather_dim(gradient, ctx.axis, ctx.shard_dim, ctx.length), None


METADATA_OPS = {
    *(
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.ndimension,
        Tensor.is_floating_point,
        Tensor.__len__,
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda")
    ),
    *(Tensor.is_complex, Tensor.element_size, IS_VIEW, Tensor.__hash__),
}
"""What asks a tensor about itself, and nothing about its numbers."""
