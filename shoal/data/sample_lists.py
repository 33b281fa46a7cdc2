"""Lists of dicts that could hold two samples or two columns, and what tells which.

    [{"boxes": (2, 4), "labels": (2,)}, {"boxes": (2, 4), "labels": (2,)}]
       two samples with two boxes each, or two columns of two samples?

torch's default_collate makes columns. Another collate function is asked for a batch of one sample:
a list of samples has one entry then, and a list of columns as many as before. Where there is none,
a list beside it that can only hold samples tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.data.tree_map import SampleList, is_per_sample, items_of, tensors_in, tree_map
from shoal.errors import UsageError

IsSamples = Callable[[int], bool | None]
"""(entries of a list) -> True if lists of dicts hold samples, False for columns; None: unknown."""


def nothing_known(_: int) -> None:
    """Return None: nothing tells what a list holds."""


def mark_sample_lists(batch: Any, is_samples: IsSamples, raises: bool = True) -> Any:
    """Return the same nest, in which lists of samples are told from lists of columns.

    Args:
        is_samples: answers for lists that could be both.
        raises: False to leave a list as it is where nothing tells.

    Raises: UsageError: nothing tells what a list holds.
    """
    if not _has_unclear(batch):
        return batch

    def marked(value: Any) -> Any:
        if not _is_unclear(value):
            return tree_map(value, marked) if items_of(value) is not None else value
        answer = is_samples(len(value))
        if answer is None and _has_sample_list(batch, len(value)):
            answer = True
        if answer is None and raises:
            raise _unclear_error(value)
        return SampleList(value) if answer else value

    return marked(batch)


def holds_samples(of_one: Any, length: int) -> bool | None:
    """Return True if lists of dicts hold samples, by a batch that was made of one sample.

    Args: length: of a list in a batch of several samples.
    """
    lengths = {len(value) for value in _nests_in(of_one) if _holds_nests(value)}
    if length in lengths:
        return False
    return True if 1 in lengths else None


def _has_unclear(value: Any) -> bool:
    items = items_of(value)
    return items is not None and (_is_unclear(value) or any(map(_has_unclear, items)))


def _is_unclear(value: Any) -> bool:
    """Return True for a list of n nests whose tensors have n rows."""
    if not _holds_nests(value) or isinstance(value, SampleList) or len(value) < 2:
        return False
    return not is_per_sample(value, len(value)) and any(True for _ in tensors_in(value))


def _holds_nests(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
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


def _nests_in(value: Any) -> list[Any]:
    items = items_of(value)
    if items is None:
        return []
    return [value, *(nest for item in items for nest in _nests_in(item))]


def _unclear_error(value: Any) -> UsageError:
    count, kind = len(value), type(value[0]).__name__
    return UsageError(
        f"a {type(value).__name__} of {count} entries ({kind}) whose tensors have {count} rows "
        f"each can hold {count} samples or {count} columns, and nothing tells which. For columns, "
        "put them into a dict, with a name for each. For samples, prepare a DataLoader whose "
        "collate_fn makes such lists: then it is known."
    )
