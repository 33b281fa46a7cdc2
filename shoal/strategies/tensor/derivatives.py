"""Derivatives of tensors in slices, and backward passes that have none of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.mappings import local_slice
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import READ_BASE, READ_VERSION, version


def check_first_derivative() -> None:
    """Check that nobody asks for the gradient of a gradient. Called in a backward pass.

    Raises:
        StrategyRefused: the backward pass is recorded, by create_graph=True.
    """
    if torch.is_grad_enabled():
        raise StrategyRefused(
            "tensor: compute_loss differentiates a gradient (create_graph=True), through a layer "
            "in slices that knows first derivatives only: a fused matrix, logits, or tokens. Leave "
            "out sequence, keep the layer whole by the strategy's option `whole`, or use ddp."
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
