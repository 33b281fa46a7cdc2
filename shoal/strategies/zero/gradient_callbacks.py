"""Callbacks in the graph: a node that tells when the gradients of some tensors have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_flatten, tree_unflatten
from shoal.platform.torch_private.tensor_state import in_function_transform


def call_on_gradients(
    callback: Callable[[], None], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors, with a node in the graph that calls `callback` in the backward pass.

    The node runs once, when the gradients of all returned tensors are there.

    Raises: StrategyRefused: as `refuse_function_transform`.
    """
    refuse_function_transform()
    outputs: tuple[Tensor, ...] = _GradientCallback.apply(callback, *tensors)
    return outputs


def refuse_function_transform() -> None:
    """Raise StrategyRefused if a transform of torch.func is active.

    No callback of gradients goes through it.
    """
    if in_function_transform():
        raise StrategyRefused(
            "zero: compute_loss calls a unit inside of a transform of torch.func (vmap, grad, "
            "jvp), which gathers no parameters again in its backward pass. Use ddp."
        )


class _GradientCallback(torch.autograd.Function):
    """Identity of tensors; its backward pass calls a function and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.callback()
        return None, *gradients


def differentiable(nest: Any) -> tuple[list[Tensor], Callable[[tuple[Tensor, ...]], Any]]:
    """Return the tensors of a nest that need a gradient, and a function that replaces them.

    The function takes as many tensors, and returns the nest with these in their places.
    """
    leaves, spec = tree_flatten(nest)
    indices = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]

    def replaced(tensors: tuple[Tensor, ...]) -> Any:
        by_index = dict(zip(indices, tensors, strict=True))
        new_leaves = [by_index.get(index, leaf) for index, leaf in enumerate(leaves)]
        return tree_unflatten(new_leaves, spec)

    return [leaves[index] for index in indices], replaced
