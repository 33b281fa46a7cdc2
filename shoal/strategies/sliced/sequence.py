"""A tensor that lies in slices of the sequence: what is done token by token, each rank does for its own tokens.

      x          t0 t1 t2 t3 t4          one device
      rank 0     t0 t1 t2                T = 2: LayerNorm, dropout, residual additions see these
      rank 1              t3 t4          the last ranks have less where T does not divide

It has the shape of the whole, and computes like the whole. Functions that are known to take each token by itself run
on slices: `token_functions.py` says which, `token_by_token.py` what follows forward and backward. Any other function
gets the whole, gathered: slower, and as exact. What is whole beside it stays whole, and gets a whole gradient. Random
numbers are drawn for all tokens, of which a rank keeps its own.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.exchange import join, slice_of
from shoal.errors import StrategyRefused
from shoal.strategies.sliced.token_functions import DESCRIBING, IN_PLACE, PASSED, SPECIAL
from shoal.torch_private.pytree import tree_leaves, tree_map, tree_map_only
from shoal.torch_private.subclasses import DisableTorchFunctionSubclass, make_wrapper_subclass
from shoal.torch_private.tensor_state import base, version


class SequenceSlices(Tensor):
    """A tensor of which this rank has `own`, its slice along dimension `along`.

    Attributes:
        order: dimensions as they lie in memory, the outermost first: dropout draws in that order.
    """

    own: Tensor
    axis: Axis
    along: int
    order: tuple[int, ...]
    _handed_out: tuple[tuple[Tensor, int], ...] = ()

    @staticmethod
    def of(own: Tensor, axis: Axis, along: int, length: int, order: Sequence[int] | None = None) -> SequenceSlices:
        """Args: length: of the whole along `along`."""
        shape = (*own.shape[:along], length, *own.shape[along + 1 :])
        order = tuple(range(own.dim())) if order is None else tuple(order)
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim], step = step, step * max(shape[dim], 1)
        made = make_wrapper_subclass(SequenceSlices, shape, strides=tuple(strides), dtype=own.dtype, device=own.device)
        made.own, made.axis, made.along, made.order = own.detach(), axis, along, order
        found: SequenceSlices = made
        return found

    def like(self, own: Tensor) -> SequenceSlices:
        """Another, of the same tokens."""
        return SequenceSlices.of(own, self.axis, self.along, self.shape[self.along], self.order)

    def gathered(self) -> Tensor:
        """The whole, on every rank, without a gradient. Collective."""
        length, place = self.shape[self.along], self.order.index(self.along)
        whole = join(self.own.permute(self.order), self.axis, place, length)
        # No view in the eyes of autograd: what follows may write into it.
        return whole.permute([self.order.index(dim) for dim in range(self.dim())]).detach()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it is made of, for whoever counts memory."""
        return ["own"], (self.axis, self.along, self.shape[self.along], self.order)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], rest: Any, shape: Any, strides: Any) -> SequenceSlices:
        return SequenceSlices.of(parts["own"], *rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without asking the other ranks."""
        return f"SequenceSlices(shape={tuple(self.shape)}, of which own={tuple(self.own.shape)}, along={self.along})"

    def __format__(self, _: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in DESCRIBING:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        for item in tree_leaves((args, options)):
            if isinstance(item, SequenceSlices):
                item._refuse_what_was_written()
        alone = all(issubclass(kind, (SequenceSlices, nn.Parameter)) for kind in types)
        if alone and func in SPECIAL and isinstance(args[0], SequenceSlices):
            return SPECIAL[func](*args, **options)
        changes_another = func in IN_PLACE and not isinstance(args[0], SequenceSlices)
        if not alone or changes_another or func not in PASSED:
            return _on_wholes(func, args, options)
        if torch.is_grad_enabled():
            args, options = tree_map_only(Tensor, _with_whole_gradient, (args, options))
        with DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from shoal.strategies.sliced.token_by_token import run  # which makes more of them

        return run(func, args, kwargs or {})

    def _refuse_what_was_written(self) -> None:
        """Of wholes that were gathered, those that somebody has views of: the views are not of this tensor."""
        if any(version(whole) != known for whole, known in self._handed_out):
            raise StrategyRefused(_written("a view of it"))


def whole_of(x: Any) -> Any:
    """The whole of what lies in slices of the sequence, differentiable; anything else as it is. Collective."""
    return _Whole.apply(x) if isinstance(x, SequenceSlices) else x


def all_whole(nest: Any) -> Any:
    """`whole_of` for every tensor of a nest. Collective."""
    return tree_map(whole_of, nest)


def _on_wholes(func: Any, args: Any, options: Any) -> Any:
    """For a function that may look at several tokens at once. What it writes there would be lost, and is refused."""
    taken: list[tuple[SequenceSlices, Tensor, int]] = []

    def whole(item: SequenceSlices) -> Tensor:
        found: Tensor = whole_of(item)  # each time anew: one that was gathered without gradients has none to pass on
        taken.append((item, found, version(found)))
        return found

    args, options = tree_map_only(SequenceSlices, whole, (args, options))
    result = func(*args, **options)
    for item, found, known in taken:
        if version(found) != known:
            raise StrategyRefused(_written(getattr(func, "__name__", str(func))))
        if any(isinstance(leaf, Tensor) and _shares(leaf, found) for leaf in tree_leaves(result)):
            item._handed_out += ((found, known),)
    return result


def _shares(view: Tensor, whole: Tensor) -> bool:
    return view is whole or base(view) is whole


def _written(what: str) -> str:
    return (
        f"sequence: {what} writes into a tensor that lies in slices of the sequence, where it would be lost. Write a "
        "new tensor, x = x + y for x += y say, or leave out sequence."
    )


def _with_whole_gradient(x: Tensor) -> Tensor:
    """Of what is whole, beside what lies in slices."""
    if isinstance(x, SequenceSlices) or not x.requires_grad:
        return x
    found: Tensor = _WholeGradient.apply(x)
    return found


def gathered_gradient(gradient: Tensor) -> Tensor:
    """A gradient as a whole, gathered where it lies in slices. Collective."""
    return gradient.gathered() if isinstance(gradient, SequenceSlices) else gradient


class GatherForward(torch.autograd.Function):
    """Gathers slices in the forward pass. What derives from it says what a rank's gradient is."""

    @staticmethod
    def forward(ctx: Any, x: SequenceSlices) -> Tensor:
        ctx.axis, ctx.along, ctx.order = x.axis, x.along, x.order
        return x.gathered()


class _Whole(GatherForward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = slice_of(gradient, ctx.axis, ctx.along)
        return SequenceSlices.of(own, ctx.axis, ctx.along, gradient.shape[ctx.along], ctx.order)


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered_gradient(gradient)
