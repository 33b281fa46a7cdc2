"""Where the samples of a batch lie, in nests of every class."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.data.tree_map import row_tensors, rows_of, take_rows, tensors_in, tree_map
from shoal.errors import UsageError

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    names: list[str]


class Encoding(UserDict):
    """As tokenizers return them."""


def columns(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(rows * 2).view(rows, 2), torch.arange(rows)


def images(sizes: list[int], channels: int = 3) -> list[Tensor]:
    return [torch.full((channels, size, size), float(size)) for size in sizes]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        Point,
        lambda x, y: {"x": x, "y": y},
        lambda x, y: OrderedDict(x=x, y=y),
        lambda x, y: Encoding(x=x, y=y),
        lambda x, y: {
            "x": [x, {"y": y}],
            "rate": 0.5,
            "size": (224, 224),
            "epoch": torch.tensor(3),
        },
    ],
)
def test_rows_are_taken_along_dimension_0_and_classes_are_kept(make: Any) -> None:
    batch = make(*columns())
    assert rows_of(batch) == 4
    taken = take_rows(batch, slice(1, 3), 4)
    assert type(taken) is type(batch)
    assert [t.tolist() for t in tensors_in(taken) if t.dim()] == [[[2, 3], [4, 5]], [1, 2]]
    assert [len(t) for t in tensors_in(batch) if t.dim()] == [4, 4], "the batch is as before"


def test_dataclasses_are_nests() -> None:
    graph = take_rows(Graph(columns()[0], list("abcd")), slice(2, 4), 4)
    assert graph.nodes.tolist() == [[4, 5], [6, 7]]
    assert graph.names == ["c", "d"]


def test_a_mapping_that_cannot_be_written_becomes_a_dict() -> None:
    assert tree_map(MappingProxyType({"a": 1}), lambda item: item + 1) == {"a": 2}


def test_lists_with_one_entry_for_each_sample_are_cut_as_lists() -> None:
    """Images of several sizes; targets with other numbers of boxes; names; sample dicts."""
    targets = [{"boxes": torch.zeros(boxes, 4)} for boxes in (2, 1, 3, 5)]
    batch = (images([5, 6, 7, 8]), targets, tuple("abcd"), [1, 2, 3, 4])
    assert rows_of(batch) == 4
    taken = take_rows(batch, slice(1, 3), 4)
    assert [tuple(image.shape) for image in taken[0]] == [(3, 6, 6), (3, 7, 7)]
    assert [len(target["boxes"]) for target in taken[1]] == [1, 3]
    assert taken[2:] == (("b", "c"), [2, 3])
    assert list(row_tensors(batch, 4)) == []


def test_an_array_and_a_list_of_scalars_are_cut() -> None:
    taken = take_rows([np.arange(3), [torch.tensor(i) for i in range(3)]], slice(0, 2), 3)
    assert taken[0].tolist() == [0, 1]
    assert taken[1] == [0, 1]


@pytest.mark.parametrize("batch", [images([8, 8, 8, 8]), (images([8, 8, 8, 8]),)])
def test_images_of_one_size_are_samples_though_they_agree_on_dimension_0(batch: Any) -> None:
    assert rows_of(batch) == 4


def test_as_many_images_as_they_have_channels_are_samples() -> None:
    assert [len(take_rows(images([8, 8, 8]), slice(0, 1), 3))] == [1]
    assert rows_of((images([8, 8, 8]), torch.zeros(3))) == 3


def test_as_many_columns_as_samples_are_columns() -> None:
    x, y = take_rows([*columns(2)], slice(1, 2), 2)
    assert (x.tolist(), y.tolist()) == ([[2, 3]], [1])


def test_columns_of_several_kinds_are_none_of_as_many_samples() -> None:
    x, y = take_rows((torch.zeros(4, 3), torch.arange(4)), slice(1, 3), 4)
    assert (x.shape, y.tolist()) == ((2, 3), [1, 2])
    with pytest.raises(UsageError, match=r"2 samples has a tensor of shape \(4, 3\)"):
        take_rows((torch.zeros(4, 3), torch.arange(4)), slice(0, 1), 2)
    pairs = [(torch.zeros(4), torch.tensor(1)), (torch.zeros(4), torch.tensor(2))]
    assert take_rows(pairs, slice(1, 2), 2) == pairs[1:]


def test_a_batch_of_no_certain_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be told: a dict with tensors of shape \(4,\)"):
        rows_of({"x": torch.zeros(4), "y": torch.zeros(5)})
    with pytest.raises(UsageError, match=r"4 samples has a tensor of shape \(5,\)"):
        take_rows([torch.zeros(5)], slice(0, 1), 4)


def test_columns_of_different_lengths_are_not_taken_for_samples() -> None:
    ragged = (torch.arange(22), torch.arange(7), torch.arange(7))
    with pytest.raises(UsageError, match="cannot be told"):
        rows_of(ragged)
    assert rows_of([torch.arange(5), torch.arange(7), torch.arange(6)]) == 3
