"""The state of one tensor for which torch has no public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef

# Why: __torch_function__ of a tensor subclass is given these objects for `x._version`, `x._base`
# and `x._is_view()`. Without: a tensor in slices is gathered whenever autograd or a user asks one
# of them. Checked: 2.11, 2.13, 2.15.
READ_VERSION: Any = Tensor._version.__get__  # type: ignore[attr-defined]
READ_BASE: Any = Tensor._base.__get__  # type: ignore[union-attr]
IS_VIEW = Tensor._is_view

# Why: conj and neg have public bits, this third promise of torch about numbers that are not in
# memory has none. Without: a gradient of zeros that has no memory would be read where it lies. Hot:
# an alias. Checked: 2.11, 2.13, 2.15.
is_zerotensor: Callable[[Tensor], bool] = Tensor._is_zerotensor


def version(tensor: Tensor) -> int:
    """Return how often `tensor` was written into in place.

    Why: autograd counts it to refuse stale gradients, and shows it nowhere else. Without: every
    buffer and every gathered whole would be compared by its numbers. Checked: 2.11, 2.13, 2.15.
    """
    return tensor._version


def base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that `tensor` is a view of; None where it is no view.

    Why: no public name tells. Without: a view of a batch would have lost its share of the batch,
    and a view of a gathered whole could be written into unseen. Checked: 2.11, 2.13, 2.15.
    """
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """Return whether `tensor` is a view in the eyes of autograd.

    Why: no public name tells. Without: every output of a unit would be copied, or a write into one
    would drop what gathers the unit again. A function and no alias, for hooks that call it may be
    compiled. Checked: 2.11, 2.13, 2.15.
    """
    return tensor._is_view()


def in_function_transform() -> bool:
    """Return whether a transform of torch.func, such as vmap, is active.

    Why: its tensors must not be kept for later, and no public name tells. Without: a trial of the
    loss would fail on outputs of a model that was called inside. Checked: 2.11, 2.13, 2.15.
    """
    return torch._C._are_functorch_transforms_active()


def has_hooks(*leaves: Any) -> bool:
    """Return whether hooks wait for the gradient of a leaf, before or after it is accumulated.

    Why: hooks can be registered by public names, and not listed. Without: a hook on a parameter
    that is cut would be lost in silence. Checked: 2.11, 2.13, 2.15.
    """
    return any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves)


def gradient_hooks(leaf: Tensor) -> dict[int, Any]:
    """Return the table of the hooks that see and may change a gradient, to read and to change.

    Why: hooks can be registered by public names, and not listed. Without: a trial of gradients
    would run the hooks of strategies and users. Checked: 2.11, 2.13, 2.15.
    """
    hooks: dict[int, Any] | None = leaf._backward_hooks
    return {} if hooks is None else hooks


def accumulation_hooks(leaf: Tensor) -> dict[int, Any]:
    """Return the table of the hooks that are called once a gradient was added to `.grad`.

    Why: as `gradient_hooks`. Without: hooks of a script would see the gradient of one micro-batch.
    Checked: 2.11, 2.13, 2.15.
    """
    hooks: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def in_backward_pass() -> bool:
    """Return whether this thread runs a backward pass of autograd.

    Why: no public name tells. Without: a layer in slices that a checkpoint computes again would be
    taken for one that was called from outside of its region. Checked: 2.11, 2.13, 2.15.
    """
    return torch._C._current_graph_task_id() != -1


def schema_of(operator: Any) -> Any:
    """Return the schema of an ATen operator: `is_mutable`, and `arguments` with their aliases.

    Why: __torch_dispatch__ is told which operator runs, and only its schema tells what that writes
    into. Without: a write into a slice would be lost. Checked: 2.11, 2.13, 2.15.
    """
    return operator._schema


def memory_of(tensor: Tensor) -> int:
    """Return the number by which the memory of a tensor is told from all other memory that lives.

    Why: views and in-place results are other tensors over the same memory, and no public name tells
    which; an address is that of the next tensor once the memory is freed. Without: a value could
    not be followed through views. Checked: 2.11, 2.13, 2.15.
    """
    return int(tensor.untyped_storage()._cdata)


def saved_value(node: Any, name: str) -> Any:
    """Return what a node of a graph has saved under a name, as "other" of a quotient; None without.

    Why: torch's notes on autograd mechanics name these attributes, and their names begin with an
    underscore. Without: nobody knows what a loss divides by that is there already. Checked: 2.11,
    2.13, 2.15.

    Raises: RuntimeError: the graph was used and freed.
    """
    return getattr(node, f"_saved_{name}", None)


# Why: what is known of memory must go with it, and memory outlives the tensors that show it; the
# public weakref of a storage is that of a Python object. Without: an address that is used again
# would be taken for the memory before. Checked: 2.11, 2.13, 2.15.
MemoryWeakRef: Any = _StorageWeakRef

# Why: `item()` of a tensor is this operator, which has no other name. Without: a mean that a script
# reads as a number could not be followed. Checked: 2.11, 2.13, 2.15.
READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
