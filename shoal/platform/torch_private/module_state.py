"""The tables that an nn.Module keeps, and base classes of its layers that have no public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

# Why: BatchNorm1d to 3d, SyncBatchNorm and those that users derive have no other base class in
# common. Without: lists of classes, and a BatchNorm of a user's own would not be known.
# Checked: 2.11, 2.13, 2.15.
BatchNormBase = _BatchNorm
"""All BatchNorms."""
NormBase = _NormBase
"""All BatchNorms and InstanceNorms: layers with running statistics."""

# Why: the same for Dropout, Dropout1d to 3d, AlphaDropout. Without: the same.
# Checked: 2.11, 2.13, 2.15.
DropoutBase = _DropoutNd

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
    "_forward_pre_hooks_with_kwargs",
)
"""Names of the tables of a module's hooks.

Why: hooks can be registered by public names, and not listed. Without: those of modules that nobody
calls as a whole would be lost in silence. Checked: 2.11, 2.13, 2.15.
"""


HOOKS_OF_STATE = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Names of the tables of hooks around a module's state dict. Why and without: see HOOKS."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters, to read and to change.

    Why: `named_parameters` leaves out None and what has two names, and gives a copy;
    `register_parameter` asks the module's `__setattr__`. Without: a module with a name twice, or a
    class that watches its attributes, could not be cut and put back. Checked: 2.11, 2.13, 2.15.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's own buffers, to read and to change.

    Why and without: see own_parameters. Checked: 2.11, 2.13, 2.15.
    """
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of the modules inside a module, to read and to change.

    Why and without: see own_parameters. Checked: 2.11, 2.13, 2.15.
    """
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are in no state dict, to read and to change.

    Why: `register_buffer(persistent=False)` sets it, and nothing tells it. Without: a stage of a
    pipeline would save buffers that one device does not. Checked: 2.11, 2.13, 2.15.
    """
    return module._non_persistent_buffers_set


def hooks_of(module: nn.Module, *kinds: str) -> list[Callable[..., Any]]:
    """Return the hooks of a module, of each kind in their order.

    Args: kinds: of "forward", "forward_pre", "backward" and "backward_pre".

    Why and without: see HOOKS. Checked: 2.11, 2.13, 2.15.
    """
    return [hook for kind in kinds for hook in getattr(module, f"_{kind}_hooks").values()]


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called.

    Why: it leaves the module's class as it is. Without: compiled layers would be cut, which is not
    shown to give the same numbers. Checked: 2.11, 2.13, 2.15.
    """
    return module._compiled_call_impl is not None


def has_one_width(attention: nn.MultiheadAttention) -> bool:
    """Return whether queries, keys and values of an attention have the same width.

    Why: it decides which parameters hold its weights. Without: torch's rule, that `kdim` and `vdim`
    are `embed_dim`, would be written a second time here. Checked: 2.11, 2.13, 2.15.
    """
    return bool(attention._qkv_same_embed_dim)


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Make `module(...)` call a function, without hooks; None: the module itself again.

    Returns: what was called before instead of the module, or None.

    Why: a call looks at the class, not at the module, for `__call__`, and a replaced `forward`
    would still run the hooks of strategies. Without: a loss could not be computed again from
    outputs that a collective forward pass has given. Checked: 2.11, 2.13, 2.15.
    """
    before: Callable[..., Any] | None = module._compiled_call_impl
    module._compiled_call_impl = call
    return before
