"""Gradients of absent values: whether they have any, and hooks on them.

h = block(x)                                        another stage computes the block
if h.requires_grad:                                 True, as in that stage
    h.register_hook(lambda g: g.clamp(-1, 1))       nothing here: the hook runs in that stage
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.platform.torch_private.pytree import tree_leaves
from shoal.strategies.pipeline.absent import AbsentTensor, absent_of

REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
HOOK_FUNCTIONS = frozenset((Tensor.register_hook, Tensor.retain_grad))
_WITHOUT_GRADIENTS = ("detach", "data", "argmax", "argmin", "argsort")


def has_gradients(value: Tensor) -> bool:
    """Return whether autograd follows a value, which may be absent."""
    absent = absent_of(value)
    return value.requires_grad if absent is None else absent.has_gradients


def seems_to_require_grad(value: Tensor, frame: FrameType) -> bool:
    """Return what `requires_grad` tells of a value, which may be absent, to code in a frame.

    Backward hooks of modules are for the stage that computes a value, so torch, which asks if it
    has to prepare for them, is told that an absent value has no gradient.
    """
    is_for_hook = frame.f_code.co_filename == torch.utils.hooks.__file__
    return has_gradients(value) and not (is_for_hook and absent_of(value) is not None)


def note_gradients(out: Any, used: Iterable[Any], label: str = "", trains: bool = False) -> None:
    """Note of absent results whether autograd follows them in the stage that computes them.

    Args:
        used: what they were computed from.
        label: name of the function.
        trains: they were computed with parameters that are trained.
    """
    tensors = (value for value in used if isinstance(value, Tensor))
    follows = torch.is_grad_enabled() and label not in _WITHOUT_GRADIENTS
    follows = follows and (trains or any(map(has_gradients, tensors)))
    for value in tree_leaves(out):
        if isinstance(value, AbsentTensor):
            value.has_gradients = follows and value.meta.is_floating_point()


def no_hook(func: Any) -> RemovableHandle | None:
    """Return what a function of HOOK_FUNCTIONS gives where there is no gradient to call a hook: for
    a value that another stage computes, and in a pass without gradients that the script never made.
    """
    return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None
