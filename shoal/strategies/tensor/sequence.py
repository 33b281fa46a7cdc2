"""Sequence parallel tensors: activations that are divided along the sequence between regions.

      x          t0 t1 t2 t3 t4          one device
      rank 0     t0 t1 t2                T = 2: LayerNorm, dropout, residual additions see these
      rank 1              t3 t4          the last ranks have fewer where T does not divide

Such a tensor has the shape of the full tensor and gives the same numbers.

    - Functions that compute each token by itself run on this rank's tokens. `sequence_functions.py`
      lists them, `sequence_dispatch.py` has the rule of each operator, forward and backward.
    - Any other function gets the full tensor, gathered: slower, and as exact.
    - Replicated tensors in the same function, such as weights of norms, get a full gradient.
    - Random numbers are drawn for all tokens, of which a rank keeps its own.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import all_gather_dim, local_slice
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_leaves, tree_map, tree_map_only
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import base, version
from shoal.strategies.tensor.derivatives import check_first_derivative
from shoal.strategies.tensor.sequence_functions import (
    IN_PLACE_FUNCTIONS,
    METADATA_FUNCTIONS,
    REPLACED_FUNCTIONS,
    TOKENWISE_FUNCTIONS,
)


class SequenceParallelTensor(Tensor):
    """A tensor of which this rank has `local`, its tokens along `shard_dim`.

    Attributes:
        memory_order: dims as they lie in memory, the outermost first. Dropout draws in this order.
    """

    local: Tensor
    axis: Axis
    shard_dim: int
    memory_order: tuple[int, ...]
    _exposed: tuple[tuple[Tensor, int], ...] = ()  # full tensors with views, and their versions

    @staticmethod
    def from_local(
        local: Tensor,
        axis: Axis,
        shard_dim: int,
        length: int,
        memory_order: Sequence[int] | None = None,
    ) -> SequenceParallelTensor:
        """Wrap this rank's tokens.

        Args:
            length: of the full tensor along `shard_dim`; T need not divide it.
            memory_order: None for a contiguous tensor.
        """
        shape = (*local.shape[:shard_dim], length, *local.shape[shard_dim + 1 :])
        order = tuple(range(local.dim())) if memory_order is None else tuple(memory_order)
        made = make_wrapper_subclass(
            SequenceParallelTensor,
            shape,
            strides=_strides(shape, order),
            dtype=local.dtype,
            device=local.device,
        )
        made.local = local.detach()
        made.axis = axis
        made.shard_dim = shard_dim
        made.memory_order = order
        wrapper: SequenceParallelTensor = made
        return wrapper

    def like(self, local: Tensor) -> SequenceParallelTensor:
        """Wrap another tensor of the same shape, for the same tokens."""
        return SequenceParallelTensor.from_local(
            local, self.axis, self.shard_dim, self.shape[self.shard_dim], self.memory_order
        )

    def gathered(self) -> Tensor:
        """Return the full tensor, on every rank, without a gradient. Collective."""
        length = self.shape[self.shard_dim]
        position = self.memory_order.index(self.shard_dim)
        in_memory_order = self.local.permute(self.memory_order)
        full = all_gather_dim(in_memory_order, self.axis, position, length)
        inverse = [self.memory_order.index(dim) for dim in range(self.dim())]
        # Detached: autograd must not take it for a view, for it may be written into.
        return full.permute(inverse).detach()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of inner tensors, and the rest: for code that counts memory."""
        return ["local"], (self.axis, self.shard_dim, self.shape[self.shard_dim], self.memory_order)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rest: Any, shape: Any, strides: Any
    ) -> SequenceParallelTensor:
        return SequenceParallelTensor.from_local(inner["local"], *rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without its values: a gather needs the other ranks."""
        return (
            f"SequenceSlices(shape={tuple(self.shape)}, of which own={tuple(self.local.shape)}, "
            f"along={self.shard_dim})"
        )

    def __format__(self, _: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        if func not in TOKENWISE_FUNCTIONS:
            # Torch looks a method up by its name, and finds what guards have put around it.
            func = getattr(func, "__wrapped__", func)
        _check_unwritten((args, options))
        # Other subclasses of Tensor have rules of their own.
        is_known = all(issubclass(kind, (SequenceParallelTensor, nn.Parameter)) for kind in types)
        is_first_sharded = bool(args) and isinstance(args[0], SequenceParallelTensor)
        if is_known and func in REPLACED_FUNCTIONS and is_first_sharded:
            return REPLACED_FUNCTIONS[func](*args, **options)
        writes_into_full = func in IN_PLACE_FUNCTIONS and not is_first_sharded
        if not is_known or writes_into_full or func not in TOKENWISE_FUNCTIONS:
            return _run_on_full(func, args, options)
        if torch.is_grad_enabled():
            args, options = tree_map_only(Tensor, _with_full_gradient, (args, options))
        with DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Imported here: the dispatch module makes tensors of this class.
        from shoal.strategies.tensor.sequence_dispatch import run

        return run(func, args, kwargs or {})

    def _check_views_unwritten(self) -> None:
        """Check that no view of a gathered full tensor was written into.

        Raises:
            StrategyRefused: such a write would not be in this tensor.
        """
        if any(version(full) != gathered for full, gathered in self._exposed):
            raise StrategyRefused(_write_message("a view of it"))


def _strides(shape: tuple[int, ...], memory_order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in this order."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(memory_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def full_tensor(x: Any) -> Any:
    """Return the full tensor of a sequence parallel one, differentiable; anything else as it is.

    Collective.
    """
    return _ToFull.apply(x) if isinstance(x, SequenceParallelTensor) else x


def gather_all(nest: Any) -> Any:
    """Return a nest with all sequence parallel tensors gathered. Collective."""
    return tree_map(full_tensor, nest)


def _check_unwritten(arguments: Any) -> None:
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, SequenceParallelTensor):
            leaf._check_views_unwritten()


def _run_on_full(func: Any, args: Any, options: Any) -> Any:
    """Run a function that may look at several tokens at once on gathered tensors. Collective.

    Raises:
        StrategyRefused: it writes into a gathered tensor, where the write would be lost.
    """
    gathered: list[tuple[SequenceParallelTensor, Tensor, int]] = []

    def gather(item: SequenceParallelTensor) -> Tensor:
        # Anew each time: a tensor that was gathered without gradients has none to pass on.
        full: Tensor = full_tensor(item)
        gathered.append((item, full, version(full)))
        return full

    args, options = tree_map_only(SequenceParallelTensor, gather, (args, options))
    result = func(*args, **options)
    leaves = tree_leaves(result)
    for item, full, known_version in gathered:
        if version(full) != known_version:
            raise StrategyRefused(_write_message(getattr(func, "__name__", str(func))))
        if any(isinstance(leaf, Tensor) and _is_view_of(leaf, full) for leaf in leaves):
            item._exposed += ((full, known_version),)
    return result


def _is_view_of(view: Tensor, full: Tensor) -> bool:
    return view is full or base(view) is full


def _write_message(what: str) -> str:
    return (
        f"sequence: {what} writes into a tensor that lies in slices of the sequence, where it "
        "would be lost. Write a new tensor, x = x + y for x += y say, or leave out sequence."
    )


def _with_full_gradient(x: Tensor) -> Tensor:
    """Return a replicated tensor so that its gradient becomes full; a sharded one as it is."""
    if isinstance(x, SequenceParallelTensor) or not x.requires_grad:
        return x
    output: Tensor = _FullGradient.apply(x)
    return output


def gathered_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as a full tensor. Collective if it is sequence parallel."""
    return gradient.gathered() if isinstance(gradient, SequenceParallelTensor) else gradient


class GatherForward(torch.autograd.Function):
    """All-gather in the forward pass. Subclasses say what the gradient of a rank is."""

    @staticmethod
    def forward(ctx: Any, x: SequenceParallelTensor) -> Tensor:
        ctx.axis = x.axis
        ctx.shard_dim = x.shard_dim
        ctx.memory_order = x.memory_order
        return x.gathered()


class _ToFull(GatherForward):
    """Gather for a function that all ranks compute alike: each takes its slice of the gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        check_first_derivative()
        local = local_slice(gradient, ctx.axis, ctx.shard_dim)
        length = gradient.shape[ctx.shard_dim]
        return SequenceParallelTensor.from_local(
            local, ctx.axis, ctx.shard_dim, length, ctx.memory_order
        )


class _FullGradient(torch.autograd.Function):
    """Identity forward; gathers a sequence parallel gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        check_first_derivative()
        return gathered_gradient(gradient)
