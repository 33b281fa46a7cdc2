"""Iterable data: the batches of the user's own DataLoader in one process, shared out."""

import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shoal
from shoal.data.loader import shard_batches
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

# torch warns of more workers than processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def of_this_worker(items: Any) -> Iterator[Any]:
    """As data sets are told to: the share of the worker, and of the rank."""
    info = get_worker_info()
    number, workers = (0, 1) if info is None else (info.id, info.num_workers)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    yield from islice(items, number * ranks + rank, None, workers * ranks)


class Stream(IterableDataset):
    """Numbers, divided among workers and ranks, of which a filter drops some."""

    def __init__(self, length: int = 50, keep: int = 7) -> None:
        self.length, self.keep = length, keep

    def __iter__(self) -> Iterator[Tensor]:
        numbers = range(self.length)
        yield from (torch.tensor(n) for n in of_this_worker(numbers) if n % self.keep)


class Drawn(Stream):
    """Each sample is its number and draws of all generators."""

    def __iter__(self) -> Iterator[Tensor]:
        for number in super().__iter__():
            yield torch.tensor([number.item(), torch.rand(()).item(), random.random()])


class Resumable(Stream):
    """Counts by itself, and says how often it was asked for a sample that it skips."""

    def __init__(self, length: int = 50) -> None:
        super().__init__(length)
        self.next = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        mine = list(of_this_worker(range(1000 * self.epoch, 1000 * self.epoch + self.length)))
        while self.next < len(mine):
            self.next += 1
            yield torch.tensor(mine[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def rows(source: Any, rank: int = 0, ranks: int = 1, epochs: int = 1) -> list[list[Any]]:
    loader = shard_batches(source, rank, ranks, seed=5)
    found = []
    for _ in range(epochs):
        for batch in loader:
            assert loader.share is not None
            found.append(batch[: loader.share.rows].tolist())
    loader.close()
    return found


def joined(shares: list[list[list[Any]]]) -> list[list[Any]]:
    """The batches of all ranks together."""
    return [[*chain(*pieces)] for pieces in zip(*shares, strict=True)]


def numbers(batches: list[list[list[float]]]) -> list[float]:
    return [row[0] for batch in batches for row in batch]


@pytest.mark.parametrize(
    ("workers", "drop_last"),
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow), (1, False), (3, True)],
)
def test_the_batches_are_those_of_the_users_own_loader(workers: int, drop_last: bool) -> None:
    def own() -> DataLoader:
        return DataLoader(Stream(), 4, num_workers=workers, drop_last=drop_last)

    assert rows(own()) == [batch.tolist() for batch in own()]
    shares = [rows(own(), rank, 3) for rank in range(3)]
    assert joined(shares) == rows(own())


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_depend_on_the_epoch_and_not_on_the_ranks(workers: int) -> None:
    def own() -> DataLoader:
        return DataLoader(Drawn(20), 4, num_workers=workers)

    whole = rows(own(), epochs=2)
    shares = [rows(own(), rank, 2, epochs=2) for rank in range(2)]
    assert joined(shares) == whole
    half = len(whole) // 2
    assert numbers(whole[:half]) == numbers(whole[half:])
    assert whole[:half] != whole[half:]


@pytest.mark.parametrize(
    ("workers", "make", "stop"),
    [
        *((0, make, stop) for make in (Stream, Drawn, Resumable) for stop in (1, 5)),
        *((2, make, stop) for make, stop in ((Drawn, 1), (Resumable, 5))),
        (3, Resumable, 4),
    ],
)
def test_a_stream_goes_on_in_the_middle_at_another_number_of_ranks(
    workers: int, make: Any, stop: int
) -> None:
    def batches(loader: Any) -> Iterator[Any]:
        for _ in range(3):
            yield from (batch.tolist() for batch in loader)

    def loader(rank: int, ranks: int) -> Any:
        own = DataLoader(make(20), 4, num_workers=workers, persistent_workers=workers == 2)
        return shard_batches(own, rank, ranks, seed=5)

    with_states = loader(1, 3)
    for _ in islice(batches(with_states), stop):
        state = with_states.state_dict()
    with_states.close()
    whole, resumed = loader(0, 1), loader(0, 1)
    resumed.load_state_dict(state)
    expected = [*batches(whole)][stop:]
    found = [*batches(resumed)]
    assert found[: len(expected)] == expected
    assert len(found) >= len(expected)
    whole.close()
    resumed.close()


def test_a_stream_with_a_state_is_not_read_again() -> None:
    class Counted(Resumable):
        def __iter__(self) -> Iterator[Tensor]:
            for item in super().__iter__():
                asked.append(item.item())
                yield item

    asked: list[int] = []
    notes: list[str] = []
    first = shard_batches(DataLoader(Counted(), 4), 0, 1, seed=5)
    for _ in islice(first, 3):
        state = first.state_dict()
    asked.clear()
    resumed = shard_batches(DataLoader(Counted(), 4), 0, 1, seed=5, announce=notes.append)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert asked == [12, 13, 14, 15]
    assert notes == []
    plain = shard_batches(DataLoader(Stream(), 4), 0, 1, seed=5, announce=notes.append)
    plain.load_state_dict(
        {
            **state,
            "readers": [{"batches": 3, "state": None, "ended": False}],
        }  # as a stream without a state has it
    )
    assert notes == [
        "note: 3 batches of Stream are read again: it has no state_dict that tells all of its "
        "position"
    ]


def test_another_number_of_workers_in_the_middle_is_refused() -> None:
    first = shard_batches(DataLoader(Stream(), 4), 0, 1, seed=5)
    next(iter(first))
    middle: dict[str, Any] = {"epoch": 0, "position": 1, "reader": 0}
    middle["readers"] = [{"batches": 1, "state": None, "ended": False}]
    other = shard_batches(DataLoader(Stream(), 4, num_workers=2), 0, 1, seed=5)
    with pytest.raises(UsageError, match=r"read by 1 readers.*now there would be 2"):
        other.load_state_dict(middle)
    other.load_state_dict({**middle, "position": 0, "epoch": 3})
    assert other.state_dict()["epoch"] == 3


def test_ready_batches_of_a_stream_are_cut() -> None:
    class Ready(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for size in (4, 1, 5):
                yield {"x": torch.arange(size), "name": [str(n) for n in range(size)]}

    loader = shard_batches(DataLoader(Ready(), batch_size=None), 1, 2, seed=0)
    assert [(batch["x"].tolist(), batch["name"]) for batch in loader] == [
        ([2, 3], ["2", "3"]),
        ([0], ["0"]),  # a stand-in
        ([3, 4], ["3", "4"]),
    ]


def test_padding_and_packing_see_the_whole_batch() -> None:
    class Texts(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            yield from (torch.arange(1 + n * 7 % 5) for n in range(9))

    def pack(samples: list[Tensor]) -> Tensor:
        flat = torch.cat(samples)
        return flat[: len(flat) // 3 * 3].view(-1, 3)

    def pad(samples: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    for collate in (pack, pad):
        own = DataLoader(Texts(), 4, collate_fn=collate)
        shares = [rows(own, rank, 2) for rank in range(2)]
        together = joined(shares)
        assert together == [batch.tolist() for batch in own]


class Split:
    """The protocol of a data set of Hugging Face that `split_dataset_by_node` has cut."""

    class _Share:
        world_size = 2

    _distributed = _Share()

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(2)


def test_data_that_is_split_already_is_refused() -> None:
    with pytest.raises(UsageError, match=r"keeps one share of 2.*Remove split_dataset_by_node"):
        shard_batches(Split(), 0, 2, seed=0)


def lengthen(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.length = 10 * (worker + 1)


def test_a_workers_own_init_function_sees_the_users_data_set() -> None:
    own = DataLoader(Stream(), 4, num_workers=2, worker_init_fn=lengthen)
    assert rows(own) == [batch.tolist() for batch in own]


def squared_error(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def trained_on_a_stream(workers: int) -> list[Tensor]:
    """Two epochs; ranks are hidden from the data while it is read and seen again after it."""
    torch.manual_seed(0)
    run = shoal.init(announce=lambda _: None)
    model = nn.Linear(1, 1).double()
    loader = DataLoader(Stream(22), 4, num_workers=workers)
    model, optimizer, batches = run.prepare(
        model, torch.optim.SGD(model.parameters(), 1e-3), loader
    )
    for _ in range(2):
        for batch in batches:
            assert dist.is_initialized() == (run.world_size > 1)
            run.forward_backward(partial(squared_error, model), batch.double()[:, None])
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_on_a_stream_gives_the_weights_of_one_device() -> None:
    expected = in_turn(trained_on_a_stream, (0,), (2,))
    for results in world.run(3, in_turn, trained_on_a_stream, (0,), (2,)):
        for found, alone in zip(results, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, alone, strict=True))


def trained_on_other_orders() -> None:
    run = shoal.init(announce=lambda _: None)
    model = nn.Linear(1, 1)
    order = [torch.full((4, 1), float(run.rank + n)) for n in range(3)]
    _, _, batches = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), order)
    for batch in batches:
        run.forward_backward(partial(squared_error, model), batch)


def test_ranks_that_read_other_samples_are_told_so() -> None:
    with pytest.raises(LaunchError, match="ranks have not read the same batches from list"):
        world.run(2, trained_on_other_orders)


class Shuffled(Resumable):
    """The protocol of a stream of Hugging Face whose state lacks its shuffle buffer."""

    class BufferShuffledExamplesIterable:
        pass

    _ex_iterable = BufferShuffledExamplesIterable()


def test_a_state_without_the_shuffle_buffer_is_not_believed() -> None:
    loader = shard_batches(DataLoader(Shuffled(), 4), 0, 1, seed=0)
    next(iter(loader))
    stream = iter(loader)
    next(stream)
    assert loader.state_dict()["readers"] == [{"batches": 1, "state": None, "ended": False}]
