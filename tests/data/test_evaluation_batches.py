"""Whole batches in turn, of every kind of loader; each counted once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

import shoal
from shoal.data.loader import EvaluationBatches
from shoal.errors import UsageError
from shoal.testing import world


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(23)


def lists() -> BatchSampler:
    return BatchSampler(SequentialSampler(range(23)), 5, False)


def loaders() -> dict[str, Any]:
    ready = [torch.arange(23)[indices] for indices in lists()]
    return {
        "map-style": DataLoader(range(23), 5),  # type: ignore[arg-type]
        "shuffled": DataLoader(range(23), 5, shuffle=True),  # type: ignore[arg-type]
        "batch sampler": DataLoader(range(23), batch_sampler=lists()),  # type: ignore[arg-type]
        "workers": DataLoader(range(23), 5, num_workers=1),  # type: ignore[arg-type]
        "ready": DataLoader(ready, batch_size=None),  # type: ignore[arg-type]
        "iterable": DataLoader(Numbers(), 5),
        "iterable in workers": DataLoader(Numbers(), 5, num_workers=1),
        "a list": ready,
    }


EXPECTED = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
EXPECTED += [[20, 21, 22]]


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("name", loaders())
def test_ranks_take_batches_in_turn(name: str, ranks: int) -> None:
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        batches = EvaluationBatches(loaders()[name], rank, ranks)
        for index, item in enumerate(batches):
            assert item.rows == len(item.batch)
            found[rank + index * ranks] = item.batch.tolist()
        assert batches.total == 5
    assert [found[number] for number in range(5)] == EXPECTED


@pytest.mark.parametrize("name", ["map-style", "iterable"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_all_ranks_make_equally_many_forward_passes_where_they_join(name: str, ranks: int) -> None:
    items = [[*EvaluationBatches(loaders()[name], r, ranks, joins=True)] for r in range(ranks)]
    assert {len(own) for own in items} == {-(-5 // ranks)}
    assert sum(item.is_counted for own in items for item in own) == 5


def test_no_batches_are_an_error() -> None:
    for empty in ([], DataLoader([], 4)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="nothing to evaluate"):
            list(EvaluationBatches(empty, 0, 1))
    with pytest.raises(UsageError, match="int is neither"):
        EvaluationBatches(3, 0, 1)


def evaluated() -> list[dict[str, float]]:
    run = shoal.init(announce=lambda _: None)

    def sums(x: Tensor) -> dict[str, Tensor]:
        return {"sine": (x * 0.1).double().sin().sum()}

    sources = loaders().values()
    return [run.evaluate(sums, each) for each in (*sources, *map(run.prepare, sources))]


def test_sums_are_the_same_to_the_last_bit_for_every_kind_of_loader() -> None:
    (expected,) = {tuple(sums.items()) for sums in evaluated()}
    for found in world.run(3, evaluated):
        assert {tuple(sums.items()) for sums in found} == {expected}


def test_a_sampler_of_some_samples_is_kept_in_the_order_of_the_data_set() -> None:
    sampler = SubsetRandomSampler([7, 1, 4, 9, 3])
    loader = DataLoader(range(10), 2, sampler=sampler, drop_last=True)  # type: ignore[arg-type]
    found = [[item.batch.tolist() for item in EvaluationBatches(loader, r, 2)] for r in (0, 1)]
    assert found == [[[1, 3], [9]], [[4, 7]]]
