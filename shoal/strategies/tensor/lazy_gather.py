"""Lazy gather: a tensor that is divided over ranks and becomes full when a function needs it.

      rank 0     local [ a b . . ] ─┐                            functions that know shards run
                                    ├─> full [ a b c d ]         on `local`; any other function
      rank 1     local [ . . c d ] ─┘                            gets `full`, gathered once

It has the shape of the full tensor and gives the same numbers. Logits of words (`vocabulary.py`)
and slices of the sequence (`sequence.py`) are such tensors.

A write goes into the gathered full tensor, which counts from then on. Other tensors may be views
of the same shards. They would not see this write, so it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import gather_from_region, local_slice, slice_to_region
from shoal.errors import StrategyRefused
from shoal.platform.tensors import dense_strides, in_memory_order, is_in_order
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import (
    IS_VIEW,
    READ_BASE,
    READ_VERSION,
    schema_of,
    version,
)

WRITE_MESSAGE = (
    "tensor: {what} writes into a tensor that lies in slices, and others have views of it that "
    "would not follow. Write a new tensor, x = x / y for x.div_(y) say, or take a clone() first; "
    "or keep the layer that gives it whole: see the strategy's option `whole`."
)


class ViewGroup:
    """Tensors that are views of the same shards.

    Attributes:
        members: the tensors.
        gathered: their full tensors, into which others may write by views; each with its version
            when it was gathered.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[LazyGatherTensor]] = []
        self.gathered: list[tuple[Tensor, int]] = []

    def join(self, member: LazyGatherTensor) -> None:
        """Add a tensor, and forget those that are freed."""
        self.members = [*map(weakref.ref, self.alive()), weakref.ref(member)]

    def alive(self) -> list[LazyGatherTensor]:
        """Return the tensors that are not freed."""
        return [member for ref in self.members if (member := ref()) is not None]

    def check_writes(self, member: LazyGatherTensor, what: str) -> None:
        """Check that every tensor of the group sees the writes so far.

        Args:
            member: the tensor that is used now.
            what: who writes, for the error.

        Raises: StrategyRefused: a write that another tensor would not see.
        """
        written = [full for full, gathered in self.gathered if version(full) != gathered]
        if not written:
            return
        has_others = any(other is not member for other in self.alive())
        if has_others or any(full is not member._full for full in written):
            raise StrategyRefused(WRITE_MESSAGE.format(what=what))


class LazyGatherTensor(Tensor):
    """A tensor of which this rank has `local`, its shard along `shard_dim`, differentiable.

    Attributes:
        shard_functions: functions that run on shards. One that returns NotImplemented gets the
            full tensor after all.
        broadcast_functions: those of them that take a shard at any place, not only as their first
            argument.
        memory_order: dims as they lie in memory, the outermost first. Dropout draws in this order.
        views: the tensors that share memory with `local`.
    """

    shard_functions: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    broadcast_functions: ClassVar[AbstractSet[Any]] = frozenset()
    local: Tensor
    axis: Axis
    shard_dim: int
    memory_order: tuple[int, ...]
    views: ViewGroup
    _full: Tensor | None
    _gathered_version: int

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        axis: Axis,
        shard_dim: int,
        length: int | None = None,
        memory_order: Sequence[int] | None = None,
        views: ViewGroup | None = None,
    ) -> Self:
        """Wrap this rank's shard.

        Args:
            length: of the full tensor along `shard_dim`; None if all shards are of one length.
            memory_order: None for a contiguous full tensor.
            views: the group of the tensor that `local` is a view of; None if it is no view.
        """
        length = axis.size * local.shape[shard_dim] if length is None else length
        order = tuple(range(local.dim())) if memory_order is None else tuple(memory_order)
        shape = (*local.shape[:shard_dim], length, *local.shape[shard_dim + 1 :])

        def without_values(x: Tensor) -> Tensor:
            strides = dense_strides(shape, order)
            made = make_wrapper_subclass(
                cls, shape, strides=strides, dtype=x.dtype, device=x.device
            )
            return cast(Tensor, made)

        # Whoever takes the wrapper as a full tensor gives it a full gradient.
        made: Any = gather_from_region(local, axis, shard_dim, length, without_values)
        made.local = local
        made.axis = axis
        made.shard_dim = shard_dim
        made.memory_order = order
        made._full = None
        made.views = ViewGroup() if views is None else views
        made.views.join(made)
        wrapper: Self = made
        return wrapper

    def like(
        self, local: Tensor, shard_dim: int | None = None, memory_order: Sequence[int] | None = None
    ) -> Self:
        """Wrap what a function of `self.local` returned.

        Args: shard_dim: None if the last dims of `local` are those of this tensor.
        """
        if local is self.local:
            return self
        shares_memory = (
            local.untyped_storage().data_ptr() == self.local.untyped_storage().data_ptr()
        )
        if shard_dim is None:
            shard_dim = local.dim() - (self.dim() - self.shard_dim)
        length = self.shape[self.shard_dim]
        views = self.views if shares_memory else None
        return type(self).from_local(local, self.axis, shard_dim, length, memory_order, views)

    @property
    def full_tensor(self) -> Tensor:
        """The full tensor, on every rank. Collective for the first use."""
        self.reattach_local()
        if self._full is None:
            # Gather with a graph even inside no_grad, for the result is kept and a later use may
            # need gradients; and outside inference mode, so that torch counts its writes.
            with torch.inference_mode(False), torch.set_grad_enabled(self.local.requires_grad):
                self._full = gather_from_region(
                    self.local, self.axis, self.shard_dim, self.shape[self.shard_dim]
                )
                if not is_in_order(self.memory_order):
                    self._full = in_memory_order(self._full, self.memory_order)
            self._gathered_version = version(self._full)
            self.views.gathered.append((self._full, self._gathered_version))
        return self._full

    @property
    def written(self) -> bool:
        """True if the full tensor was written into, so that the shards are no longer valid."""
        return self._full is not None and version(self._full) != self._gathered_version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        leaves = tree_leaves((args, options))
        items = [leaf for leaf in leaves if isinstance(leaf, LazyGatherTensor)]
        for item in items:
            item.reattach_local()
            item.views.check_writes(item, "somebody")
        rule = _shard_rule(func, args, items)
        if rule is not None:
            on_shards = rule(*args, **options)
            if on_shards is not NotImplemented:
                return on_shards
        result = func(*_full_tensors(args), **_full_tensors(options))
        for item in items:
            item.views.check_writes(item, getattr(func, "__name__", str(func)))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below __torch_function__ a write into the full tensor would not be noticed.
        if schema_of(func).is_mutable:
            raise StrategyRefused(WRITE_MESSAGE.format(what=func))
        return func(*_full_tensors(args), **_full_tensors(kwargs or {}))

    def reattach_local(self) -> None:
        """Derive `local` from this wrapper if an autograd.Function of the user's returned it.

        Such a Function, activation checkpointing say, runs without a graph. Then `local` has no
        gradient, while the wrapper has one.
        """
        with DisableTorchFunctionSubclass():
            is_detached = self.requires_grad and not self.local.requires_grad
        if not is_detached:
            return
        if self.written:
            raise StrategyRefused(WRITE_MESSAGE.format(what="an autograd.Function"))
        with torch.inference_mode(False), torch.enable_grad():
            own = self.local.detach()
            self.local = slice_to_region(self, self.axis, self.shard_dim, lambda _: own)
            self._full = None


def _shard_rule(
    func: Any, args: tuple[Any, ...], items: list[LazyGatherTensor]
) -> Callable[..., Any] | None:
    """Return how a function runs on the shards of `items`; None if it gets full tensors."""
    is_first = bool(args) and isinstance(args[0], LazyGatherTensor)
    owner = args[0] if is_first else items[0]
    if func not in owner.shard_functions:
        # Torch looks a method up by its name, and finds what guards have put around it.
        func = getattr(func, "__wrapped__", func)
    if any(item.written for item in items) or not (is_first or func in owner.broadcast_functions):
        return None
    return owner.shard_functions.get(func)


def _full_tensors(nest: Any) -> Any:
    return tree_map_only(LazyGatherTensor, lambda item: item.full_tensor, nest)


METADATA_FUNCTIONS = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.ndimension, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.stride),
    *(IS_VIEW, Tensor.__len__, Tensor.__hash__),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_meta")
    ),
}
"""Functions that read no values of a tensor: they run on the wrapper."""


def check_first_derivative() -> None:
    """Check that nobody asks for the gradient of a gradient. Called in a backward pass.

    Raises: StrategyRefused: the backward pass is recorded, by create_graph=True.
    """
    if torch.is_grad_enabled():
        raise StrategyRefused(
            "tensor: compute_loss differentiates a gradient (create_graph=True), through a layer "
            "of tokens in slices, which knows first derivatives only. Leave out sequence, keep the "
            "layer whole by the strategy's option `whole`, or use ddp."
        )


def _register_hook(x: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook of the user's, which sees the gradient of the full tensor."""

    def hook_on_local(local_gradient: Tensor) -> Tensor | None:
        gradient = x.like(local_gradient)
        result = hook(gradient)
        if result is None or result is gradient:
            # The hook may have written into the gradient it was given.
            if not gradient.written:
                return None
            return local_slice(gradient.full_tensor, x.axis, x.shard_dim)
        return local_slice(result, x.axis, x.shard_dim)

    return x.local.register_hook(hook_on_local)


def _gradient(x: Any) -> Any:
    return None if x.local.grad is None else x.like(x.local.grad)


def _set_requires_grad(x: Any, needs_gradient: bool = True) -> Any:
    x.local.requires_grad_(needs_gradient)
    x._full = None
    return x


AUTOGRAD_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad.__get__: lambda x: x.local.requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.grad_fn.__get__: lambda x: x.local.grad_fn,  # type: ignore[union-attr]
    Tensor.grad.__get__: _gradient,  # type: ignore[union-attr]
    Tensor.is_leaf.__get__: lambda x: x.local.is_leaf,  # type: ignore[attr-defined]
    Tensor.is_inference: lambda x: x.local.is_inference(),
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: lambda x: x.local.retain_grad(),
    Tensor.detach: lambda x: x.like(x.local.detach(), memory_order=x.memory_order),
    READ_BASE: lambda x: None,
    READ_VERSION: lambda x: version(x.local),
}
"""Functions of autograd on a tensor in slices. Each runs on its shard `local`."""
