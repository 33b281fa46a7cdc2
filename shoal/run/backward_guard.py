"""A bare `.backward()` on a prepared model is an error that says so, never a wrong gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.torch_private.pytree import tree_leaves


class BackwardGuard:
    """A forward hook, and the time of a `forward_backward`: outside, an output may be looked at,
    not differentiated.

    Copies and pickles of the model take along a watch of nothing: they are the user's own to train
    or to average."""

    def __init__(self) -> None:
        self._watching, self._inside = False, False

    def over(self, model: nn.Module) -> None:
        """Watch `model`."""
        self._watching = True
        model.register_forward_hook(self)

    def __reduce__(self) -> tuple[type[BackwardGuard], tuple[()]]:
        return type(self), ()

    def __enter__(self) -> None:
        """A `forward_backward` begins."""
        self._inside = True

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._watching and not self._inside and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(_refuse_bare_backward)


def _refuse_bare_backward(_: Tensor) -> None:
    raise UsageError(
        "a bare .backward() reached a prepared model: its gradients would be this rank's alone. "
        "Use "
        "loss = run.forward_backward(loss_fn, model, x, y) instead of loss_fn(model(x), y) and "
        "loss.backward()."
    )
