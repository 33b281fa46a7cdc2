"""Global batches of any kind, and the rows that each rank gets of them."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shoal.data.batch_fetcher import Collate
from shoal.data.batch_shards import BatchRegistry, BatchShard, share_batch
from shoal.data.loader import shard_batches
from shoal.data.sharded_loader import OWN_ROWS_NOTE
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError


class Numbers(Dataset):
    """Sample i is i and a draw."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.rand(())


class Buckets(Sampler):
    """Lists of several lengths, in an order that is drawn."""

    def __iter__(self) -> Iterator[list[int]]:
        lists = [[0, 1, 2, 3, 4], [5], [6, 7, 8], list(range(9, 23))]
        yield from (lists[index] for index in torch.randperm(4).tolist())


class Texts(Dataset):
    """Sample i is i numbers; 4 % 3 + 1 of them are short."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(1 + index * 7 % 11)


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
    return {"ids": padded, "mask": padded >= 0}


def mask_at_random(samples: list[Tensor]) -> Tensor:
    return torch.stack([torch.where(torch.rand(()) < 0.5, len(s), -len(s)) for s in samples])


def pack(samples: list[Tensor]) -> Tensor:
    """Rows of five numbers each."""
    flat = torch.cat(samples)
    return flat[: len(flat) // 5 * 5].view(-1, 5)


def without_multiples(samples: list[Any]) -> tuple[Tensor, ...]:
    """Leave out each sample whose number is a multiple of 4."""
    return tuple(map(torch.stack, zip(*(s for s in samples if s[0] % 4), strict=True)))


def both_views(samples: list[Any]) -> tuple[Tensor, Tensor]:
    number, draw = map(torch.stack, zip(*samples, strict=True))
    return torch.cat([number, -number]), torch.cat([draw, draw])


def keep_apart(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


class Shapes(Dataset):
    """Images of different sizes and boxes of different numbers."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.full((3, 2 + index, 4), index), {"boxes": torch.full((index % 3, 4), index)}


class Ready(Dataset):
    """Item i is a whole batch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": torch.arange(10 * index, 10 * index + 3 + index),
            "draw": torch.rand(3 + index),
        }


def again() -> list[Tensor]:
    return [torch.arange(5), torch.arange(5, 7), torch.arange(7, 13)]


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: DataLoader(Numbers(), 5, shuffle=True),
    "a batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "torch's batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, True)
    ),
    "workers": lambda: DataLoader(Numbers(), batch_sampler=Buckets(), num_workers=2),
    "ready batches": lambda: DataLoader(Ready(), batch_size=None, shuffle=True),
    "padding": lambda: DataLoader(Texts(), 6, shuffle=True, collate_fn=pad),
    "padding in a worker": lambda: DataLoader(
        Texts(), 6, shuffle=True, collate_fn=pad, num_workers=1
    ),
    "padding after a batch of one": lambda: DataLoader(
        Texts(), batch_sampler=[[3], [4], [0, 1, 2, 3], [5, 6]], collate_fn=pad
    ),
    "random masks": lambda: DataLoader(Texts(), 6, collate_fn=mask_at_random),
    "packing": lambda: DataLoader(Texts(), 6, collate_fn=pack),
    "samples left out": lambda: DataLoader(
        Numbers(),
        batch_sampler=[[1, 2, 3, 4, 5, 6, 8, 9], [7, 8], [9, 10, 11]],
        collate_fn=without_multiples,
    ),
    "views of two samples": lambda: DataLoader(Numbers(), 2, collate_fn=both_views),
    "images of different sizes": lambda: DataLoader(Shapes(), 4, collate_fn=keep_apart),
    "samples as they are": lambda: DataLoader(Shapes(), 4, collate_fn=list),
    "a list": again,
    "a tuple of dicts": lambda: tuple({"x": batch} for batch in again()),
    "a generator": lambda: (batch for batch in again()),
}


def parts(batch: Any, rows: int) -> list[Any]:
    """The first rows of every tensor; a stand-in has none. Entries of lists of samples stay."""
    if not rows:
        return []
    return [tensor.tolist() for tensor in tensors_in(batch)]


def epoch(source: Any, rank: int, ranks: int) -> list[tuple[Any, int, int]]:
    loader = shard_batches(source, rank, ranks, seed=7)
    found = []
    for batch in loader:
        assert loader.share is not None
        found.append((batch, loader.share.rows, loader.share.global_rows))
    loader.close()
    return found


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("name", LOADERS)
def test_the_rows_of_all_ranks_are_those_of_one_process(name: str, ranks: int) -> None:
    whole = epoch(LOADERS[name](), 0, 1)
    shares = [epoch(LOADERS[name](), rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(whole)}
    for (batch, rows, _), *pieces in zip(whole, *shares, strict=True):
        assert sum(piece[1] for piece in pieces) == rows
        assert {piece[2] for piece in pieces} == {rows}
        kept = [piece[0] for piece in pieces if piece[1]]
        if isinstance(batch, (tuple, list)) and not isinstance(batch[0], Tensor):
            joined: list[Any] = [t for piece in kept for t in tensors_in(by_sample(piece))]
            expected = [*tensors_in(by_sample(batch))]
        else:
            joined = [torch.cat(ts) for ts in zip(*map(tensors_in, kept), strict=True)]
            expected = [*tensors_in(batch)]
        assert [t.tolist() for t in joined] == [t.tolist() for t in expected]


def by_sample(batch: Any) -> Any:
    """Columns of samples as a list of samples."""
    return list(zip(*batch, strict=True)) if isinstance(batch, tuple) else batch


@pytest.mark.slow
def test_a_sampler_of_1e10_indices_is_drawn_as_far_as_it_is_needed() -> None:
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=10**10)
    loader = shard_batches(DataLoader(Numbers(), 4, sampler=sampler), 1, 2, seed=0)
    seen = [index.tolist() for index, _ in islice(loader, 3000)]
    assert len(seen) == 3000
    assert len(loader) == 10**10 // 4  # type: ignore[arg-type]
    resumed = shard_batches(DataLoader(Numbers(), 4, sampler=sampler), 1, 2, seed=0)
    resumed.load_state_dict({"epoch": 0, "position": 8000})
    assert [index.tolist() for index, _ in islice(resumed, 1000)] == seen[2000:]


def test_an_order_that_is_drawn_lazily_leaves_the_callers_random_numbers_alone() -> None:
    class Own(Sampler):
        def __len__(self) -> int:
            return 10_000

        def __iter__(self) -> Iterator[int]:
            return (random.randrange(23) for _ in range(10_000))

    def run(disturbed: bool) -> list[Any]:
        loader = shard_batches(DataLoader(Numbers(), 1000, sampler=Own()), 0, 1, seed=0)
        found = []
        for index, _ in loader:
            found.append(index.tolist())
            if disturbed:
                random.seed(0)
        return found

    assert run(disturbed=True) == run(disturbed=False)


@pytest.mark.parametrize(
    "name", ["a sampler", "a batch sampler", "workers", "ready batches", "a list"]
)
@pytest.mark.parametrize("stop", [1, 4])
def test_a_position_goes_on_at_another_number_of_ranks(name: str, stop: int) -> None:
    def batches(loader: Any) -> Iterator[Any]:
        """Of endless epochs."""
        while True:
            yield from (parts(batch, 1) for batch in loader)

    whole = [*islice(batches(shard_batches(LOADERS[name](), 0, 1, seed=7)), 9)]
    first = shard_batches(LOADERS[name](), 0, 2, seed=7)
    for _ in islice(batches(first), stop):
        state = first.state_dict()
    first.close()
    resumed = shard_batches(LOADERS[name](), 0, 1, seed=7)
    resumed.load_state_dict(state)
    assert [*islice(batches(resumed), 9 - stop)] == whole[stop:]
    resumed.close()


def test_a_generator_gives_one_epoch() -> None:
    loader = shard_batches((batch for batch in again()), 0, 2, seed=0)
    assert len(list(loader)) == 3
    with pytest.raises(UsageError, match="a generator gives its batches once"):
        list(loader)


def test_padding_is_noted_and_can_be_told_to_be_harmless() -> None:
    notes: list[str] = []

    def lengths(collate: Any) -> set[int]:
        notes.clear()
        source = DataLoader(Texts(), 6, collate_fn=collate)
        loader = shard_batches(source, 0, 2, 7, announce=notes.append)
        return {batch["ids"].shape[1] for batch in loader}

    whole = {
        pad([Texts()[i] for i in range(k, min(k + 6, 20))])["ids"].shape[1] for k in (0, 6, 12, 18)
    }
    assert lengths(pad) == whole
    assert notes[1:] == [f"note: {OWN_ROWS_NOTE}"]
    assert "pads to the longest" in notes[0]
    assert lengths(Collate(pad, whole_batch=False)) != whole
    assert notes == [f"note: {OWN_ROWS_NOTE}"]


def test_padding_that_a_first_look_misses_is_noted_when_shapes_change() -> None:
    notes: list[str] = []

    class Late(Texts):
        def __getitem__(self, index: int) -> Tensor:
            return torch.arange(4 if index < 6 else index)

    list(shard_batches(DataLoader(Late(), 6, collate_fn=pad), 0, 2, 7, announce=notes.append))
    assert notes[1:] == [f"note: {OWN_ROWS_NOTE}"]
    assert "has made rows of shape (4,) and (8,)" in notes[0]


@pytest.mark.parametrize("batched", [False, True])
def test_a_distributed_sampler_is_refused_wherever_it_is(batched: bool) -> None:
    sampler: Any = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    arguments = (
        {"batch_sampler": BatchSampler(sampler, 2, False)} if batched else {"sampler": sampler}
    )
    with pytest.raises(UsageError, match="has a DistributedSampler"):
        shard_batches(DataLoader(Numbers(), **arguments), 0, 2, seed=0)


def test_a_sample_that_is_left_out_later_is_refused_with_the_cure() -> None:
    source = DataLoader(Numbers(), batch_sampler=[[1, 2, 3, 5], [6, 7, 8, 9]])
    source.collate_fn = without_multiples
    with pytest.raises(UsageError, match=r"fewer rows .*shoal\.Collate\(collate_fn, whole"):
        list(shard_batches(source, 1, 2, seed=0))
    source.collate_fn = Collate(without_multiples, whole_batch=True)
    assert [len(number) for number, _ in shard_batches(source, 1, 2, seed=0)] == [2, 1]


def test_what_gives_no_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="int gives no batches"):
        shard_batches(3, 0, 2, seed=0)


def test_a_batch_of_fewer_rows_than_ranks_gives_the_others_a_stand_in() -> None:
    batch = {"x": torch.arange(2), "name": ["a", "b"]}
    shares = [share_batch(batch, rank, 3) for rank in range(3)]
    assert [local["x"].tolist() for local, _ in shares] == [[0], [1], [0]]
    assert [local["name"] for local, _ in shares] == [["a"], ["b"], ["a"]]
    assert [(shard.rows, shard.global_rows) for _, shard in shares] == [(1, 2), (1, 2), (0, 2)]


def test_a_sequential_batch_sampler_knows_its_length() -> None:
    sampler = BatchSampler(SequentialSampler(Numbers()), 5, False)
    loader: Any = shard_batches(DataLoader(Numbers(), batch_sampler=sampler), 0, 2, seed=0)
    assert len(loader) == 5


def test_a_new_tensor_is_not_taken_for_one_that_is_gone() -> None:
    yielded, gone = BatchRegistry(), set()
    for _ in range(100):
        tensor = torch.zeros(1)
        gone.add(id(tensor))
        yielded.remember([tensor], BatchShard(0, 1, 1, 1))
        del tensor
    new = [torch.zeros(1) for _ in range(100)]
    assert gone & {id(tensor) for tensor in new}, "Python gives ids out again"
    assert not any(map(yielded.shard_of, new))
