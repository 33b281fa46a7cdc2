"""Nests of tensors: tuples, lists, mappings and dataclasses, and the samples that lie in them.

    {"x": (8, 5), "image": [8 tensors of any shape], "file": [8 strings], "rate": 0.1}
       dimension 0          one entry for each sample                     stays whole

torch's pytree treats an unregistered class of mapping or list as one leaf: the UserDict that
tokenizers return, a mappingproxy, a user's own list class. Here all of these are nests, and a map
keeps their class.

Lists of tensors or of dicts could hold two samples or two columns:

    [(2, 4), (2, 4)]    [{"boxes": (2, 4), "labels": (2,)}, {"boxes": (2, 4), "labels": (2,)}]
       two samples with two boxes each, or two columns of two samples?

torch's default_collate makes columns. Another collate function is asked for a batch of one sample:
a list of samples has one entry then, and a list of columns as many as before. Where there is none,
a list beside it that can only hold samples tells. Where nothing tells, tensors are columns.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.platform.torch_private.pytree import register_pytree_node

SPARSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
"""Layouts of tensors whose rows do not lie one after the other."""
IsSamples = Callable[[int], bool | None]
"""(entries of a list) -> True if such lists hold samples, False for columns; None: unknown."""


class SampleList(list[Any]):
    """A list with one entry for each sample, where its entries look like columns."""


register_pytree_node(SampleList, lambda each: (list(each), None), lambda each, _: SampleList(each))


def tree_map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container like `value` with `function` applied to its items; return other values
    unchanged.
    """
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: function(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return _sequence_like(value, [function(item) for item in value])
    if _is_dataclass(value):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past the guard of a frozen dataclass: the copy is not yet anyone's.
            object.__setattr__(new, field.name, function(getattr(value, field.name)))
        return new
    return value


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a tuple, list, mapping or dataclass; None for any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return list(value)
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in items_of(value) or ():
        yield from tensors_in(item)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a nest with its tensors on `device`; those that are there already stay the same.

    Other values that have a method `to`, such as a PackedSequence, are asked to move themselves.
    """
    if isinstance(value, Tensor):
        # Towards the CPU, a copy that nobody waits for would be read before it is there.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(value, "to", None)):
        return value.to(device)
    return tree_map(value, lambda item: to_device(item, device))


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch.

    It is the size of dimension 0 of every tensor, or the length of lists with one entry for each
    sample.

    Raises: UsageError: the tensors and lists of the batch do not agree on a number.
    """
    # The entries of a tuple are columns: (ids, offsets, labels) are not three samples.
    is_columns = type(batch) is tuple
    counts = _rows_of_columns(batch) if is_columns else _possible_rows(batch)
    if counts is None:
        # No tensors: the longest list counts, such as the strings of a batch.
        counts = {len(v) for v in _nests_in(batch) if isinstance(v, list) and len(v)}
        counts = {max(counts)} if counts else set()
    if not counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in [*tensors_in(batch)][:4])
        raise UsageError(
            f"the number of samples of a batch cannot be told: a {type(batch).__name__}"
            f"{f' with tensors of shape {shapes}' if shapes else ' without tensors'}. Put the "
            "samples along dimension 0 of every tensor, or into lists with one entry for each "
            "sample."
        )
    return counts.pop() if len(counts) == 1 else _likely_rows(batch, counts)


def take_rows(
    batch: Any,
    window: slice,
    num_samples: int,
    mismatch: Callable[[Tensor], UsageError] | None = None,
) -> Any:
    """Return the samples `window` of a nest, in a nest of the same classes.

    Tensors and arrays are sliced along dimension 0, lists with one entry for each sample as lists.
    Values without rows, such as tensors of 0 dimensions and numbers, stay as they are.

    Args:
        num_samples: samples in `batch`; 0 for a batch of one stand-in.
        mismatch: makes the error for a tensor of another size; a general one by default.

    Raises: UsageError: dimension 0 of a tensor is not `num_samples`, or a tensor is sparse.
    """
    count = max(num_samples, 1)
    if isinstance(batch, Tensor):
        if not batch.dim():
            return batch
        if batch.shape[0] != count:
            if mismatch is not None:
                raise mismatch(batch)
            raise UsageError(
                f"a batch of {count} samples has a tensor of shape {tuple(batch.shape)}. Put the "
                "samples along dimension 0."
            )
        return batch[window] if batch.layout not in SPARSE else _sparse_rows(batch, window, count)
    if isinstance(batch, np.ndarray):
        return batch[window] if batch.ndim and batch.shape[0] == count else batch
    if is_per_sample(batch, count):
        return _sequence_like(batch, list(batch[window]))
    return tree_map(batch, lambda item: take_rows(item, window, num_samples, mismatch))


def _sparse_rows(tensor: Tensor, window: slice, count: int) -> Tensor:
    """Return a sparse tensor whole; its rows alone would be no graph any more.

    Raises: UsageError: fewer rows are wanted.
    """
    if range(count)[window] == range(count):
        return tensor
    raise UsageError(
        f"a sparse tensor of shape {tuple(tensor.shape)} is in a batch that is to be divided into "
        "rows: among ranks, by accumulate, by a pipeline or for its first samples. The adjacency "
        "of a graph couples all of its rows, so such a batch stays in one piece: give each rank "
        "graphs of its own (ddp or zero, no pipeline, accumulate=1). If the rows are samples, pass "
        "tensor.to_dense()."
    )


def row_tensors(batch: Any, num_samples: int) -> Iterator[Tensor]:
    """Yield the tensors that lie in no list with one entry for each sample."""
    if isinstance(batch, Tensor):
        yield batch
    elif not is_per_sample(batch, max(num_samples, 1)):
        for item in items_of(batch) or ():
            yield from row_tensors(item, num_samples)


def is_per_sample(value: Any, num_samples: int) -> bool:
    """Return True for a tuple or list with one entry for each sample.

    `[x, y]` of two samples could be two columns or two samples. It is two columns, as torch's
    default_collate makes them, if all of its tensors have two rows. Images (channels, height,
    width) of one dtype are samples. Tensors of several kinds, floats and classes, are columns.
    """
    if not isinstance(value, (tuple, list)) or hasattr(value, "_fields"):
        return False
    if len(value) != num_samples or num_samples == 0:
        return False
    if isinstance(value, SampleList):
        return True
    if _are_of_kinds(value):
        return False
    columns = _rows_of_columns(value)
    return columns is None or num_samples not in columns or _are_images(value)


def _possible_rows(value: Any) -> set[int] | None:
    """Return the row counts that a nest allows; None if any number does."""
    if isinstance(value, (Tensor, np.ndarray)):
        return {value.shape[0]} if value.ndim else None
    counts = _rows_of_columns(items_of(value) or ())
    if not isinstance(value, (tuple, list)) or hasattr(value, "_fields"):
        return counts
    if isinstance(value, SampleList):
        return {len(value)}
    if _are_of_kinds(value):
        return counts
    # Numbers and strings alone may be a setting, such as the size of an image.
    return counts if counts is None else counts | {len(value)}


def _rows_of_columns(items: Sequence[Any]) -> set[int] | None:
    """Return the row counts that all items allow; None if any number does."""
    common: set[int] | None = None
    for item in items:
        counts = _possible_rows(item)
        if counts is not None:
            common = set(counts) if common is None else common & counts
    return common


def _likely_rows(batch: Any, counts: set[int]) -> int:
    """Return the count by which no list of images is divided, else that of the first tensor."""
    for value in _nests_in(batch):
        if isinstance(value, (tuple, list)) and len(value) in counts and _are_images(value):
            return len(value)
    first = next((t.shape[0] for t in tensors_in(batch) if t.dim()), 0)
    return first if first in counts else max(counts)


def _nests_in(value: Any) -> Iterator[Any]:
    items = items_of(value)
    if items is not None:
        yield value
        for item in items:
            yield from _nests_in(item)


def _are_images(value: Sequence[Any]) -> bool:
    """Return True if all items are tensors of three dimensions and one dtype."""
    return all(
        isinstance(item, Tensor) and item.dim() == 3 and item.dtype == value[0].dtype
        for item in value
    )


def _are_of_kinds(value: Sequence[Any]) -> bool:
    """Return True for tensors of several dtypes or numbers of dimensions."""
    return are_tensors(value) and len({(item.dtype, item.dim()) for item in value}) > 1


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _sequence_like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return items if type(value) is list else type(value)(items)


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class: a copy with other values; a dict if it has no setter."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    new = copy.copy(value)
    new.update(items)
    return new


def are_tensors(arguments: Sequence[Any]) -> bool:
    """Return True if all arguments are tensors, as in most scripts.

    No nest has to be searched for tensors then, which would take longer than a small layer.
    """
    for argument in arguments:  # noqa: SIM110 (a generator takes twice as long)
        if not isinstance(argument, Tensor):
            return False
    return True


def nothing_known(_: int) -> None:
    """Return None: nothing tells what a list holds."""


def mark_sample_lists(batch: Any, is_samples: IsSamples, raises: bool = True) -> Any:
    """Return the same nest, in which lists of samples are told from lists of columns.

    Args:
        is_samples: answers for lists that could be both.
        raises: False to leave a list of dicts as it is where nothing tells.

    Raises: UsageError: nothing tells what a list holds.
    """
    if not any(map(_is_unclear, _nests_in(batch))):
        return batch

    def marked(value: Any) -> Any:
        if not _is_unclear(value):
            return tree_map(value, marked) if items_of(value) is not None else value
        answer = is_samples(len(value))
        if answer is None and _has_sample_list(batch, len(value)):
            answer = True
        if answer is None and raises and not are_tensors(value):
            count, kind = len(value), type(value[0]).__name__
            raise UsageError(
                f"a {type(value).__name__} of {count} entries ({kind}) whose tensors have {count} "
                f"rows each can hold {count} samples or {count} columns, and nothing tells which. "
                "For columns, put them into a dict, with a name for each. For samples, prepare a "
                "DataLoader whose collate_fn makes such lists: then it is known."
            )
        return SampleList(value) if answer else value

    return marked(batch)


def holds_samples(of_one: Any, length: int) -> bool | None:
    """Return True if unclear lists hold samples, by a batch that was made of one sample.

    Args: length: of a list in a batch of several samples.
    """
    lengths = {len(value) for value in _nests_in(of_one) if _may_be_samples(value)}
    if length in lengths:
        return False
    return True if 1 in lengths else None


def _is_unclear(value: Any) -> bool:
    """Return True for a list of n tensors or nests with n rows each."""
    if not _may_be_samples(value) or isinstance(value, SampleList) or len(value) < 2:
        return False
    return not is_per_sample(value, len(value)) and any(True for _ in tensors_in(value))


def _may_be_samples(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    if are_tensors(value):
        return isinstance(value, list)
    # Tuples of tuples are states of layers, keys and values: columns.
    return not any(isinstance(v, (list, tuple)) or items_of(v) is None for v in value)


def _has_sample_list(batch: Any, length: int) -> bool:
    """Return True if a list beside the unclear one can only be one of so many samples."""
    return any(
        isinstance(nest, list)
        and is_per_sample(nest, length)
        and any(True for _ in tensors_in(nest))
        for nest in _nests_in(batch)
    )
