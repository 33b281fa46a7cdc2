"""Which sample comes when is a function of (seed, epoch, global index) alone."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shoal.data.loader import DistributedBatchLoader
from shoal.data.seeds import (
    derive_seed,
    load_random_state,
    preserve_rng_state,
    random_state,
    seed_all,
)


class Noisy(Dataset):
    """Every sample is its index and three draws: torch's, Python's and NumPy's."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor(
            [torch.rand(()).item(), random.random(), np.random.rand()]
        )


def epochs(
    rank: int = 0, ranks: int = 1, workers: int = 0, count: int = 2, **arguments: object
) -> list[list[Tensor]]:
    """For each global batch of `count` epochs, this rank's rows as (index, draws)."""
    arguments = {"shuffle": True, "num_workers": workers, **arguments}
    loader = DataLoader(Noisy(), batch_size=5, **arguments)  # type: ignore[arg-type]
    shared = DistributedBatchLoader(loader, rank, ranks, seed=7)
    found = []
    for _ in range(count):
        for index, draws in shared:
            assert shared.share is not None
            rows = torch.cat([index.double()[:, None], draws.double()], dim=1)
            found.append(rows[: shared.share.rows])
    return found


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def test_every_epoch_has_every_sample_once_in_another_order_with_other_draws() -> None:
    batches = epochs()
    first, second = torch.cat(batches[:5]), torch.cat(batches[5:])
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(23))
    assert first[:, 0].tolist() != second[:, 0].tolist()
    assert len(set(first[:, 1].tolist() + second[:, 1].tolist())) == 46


def test_fetching_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    epochs()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("drop_last", "position"), [(False, 23), (True, 20)])
def test_behind_its_last_batch_an_epoch_goes_on_without_batches(
    drop_last: bool, position: int
) -> None:
    batches = DataLoader(Noisy(), batch_size=5, drop_last=drop_last)
    loader = DistributedBatchLoader(batches, 0, 1, seed=0)
    loader.load_state_dict({"epoch": 1, "position": position})
    assert loader.epoch == 1
    assert list(loader) == []
    assert loader.state_dict() == {"epoch": 2, "position": 0}
    assert len(list(loader)) == len(batches)


def test_leaving_an_epoch_early_ends_it() -> None:
    loader = DistributedBatchLoader(DataLoader(Noisy(), batch_size=5), 0, 1, seed=0)
    for _ in loader:
        break
    assert loader.epoch == 1
    assert len(list(loader)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_inside_of_another_one_sees_all_samples_and_so_does_the_outer_one(
    workers: int,
) -> None:
    loader = DataLoader(Noisy(), batch_size=5, num_workers=workers)
    shared = DistributedBatchLoader(loader, 0, 1, seed=7)
    abandoned = iter(shared)
    next(abandoned)  # a look at the data before training
    outer, inner = [], []
    for index, _ in shared:
        outer += index.tolist()
        if len(outer) == 10:
            inner = [number for index, _ in shared for number in index.tolist()]
    assert outer == inner == list(range(23))


def test_a_position_that_is_loaded_within_a_loop_is_where_the_next_one_begins() -> None:
    shared = DistributedBatchLoader(DataLoader(Noisy(), batch_size=5), 0, 1, seed=7)
    left = iter(shared)
    next(left)
    state = shared.state_dict()
    next(left)
    shared.load_state_dict(state)
    left.close()
    assert [number for index, _ in shared for number in index.tolist()] == list(range(5, 23))


def test_it_has_the_attributes_of_the_script_s_loader_and_no_others() -> None:
    script_loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, drop_last=True)
    loader = DistributedBatchLoader(script_loader, 0, 2, seed=0)
    assert loader.batch_sampler is script_loader.batch_sampler
    assert loader.drop_last
    assert copy.copy(loader).num_workers == 0
    with pytest.raises(AttributeError, match="no attribute 'mixup'"):
        loader.mixup  # noqa: B018


def test_a_tensor_dataset_gives_the_same_batches_as_one_that_is_fetched_sample_by_sample() -> None:
    class Plain(Dataset):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return tensors[0][index], tensors[1][index]

    tensors = torch.randn(9, 2), torch.arange(9)
    fast, slow = (
        DistributedBatchLoader(DataLoader(dataset, batch_size=4, shuffle=True), 0, 1, seed=0)
        for dataset in (TensorDataset(*tensors), Plain())
    )
    for left, right in zip(fast, slow, strict=True):
        assert equal(list(left), list(right))


def test_neighbouring_streams_are_unrelated_and_depend_on_the_order_of_their_names() -> None:
    seeds = {
        derive_seed(seed, epoch, index) & 0xFFFFFFFF
        for seed in range(10)
        for epoch in range(10)
        for index in range(10)
    }
    assert len(seeds) == 1000
    assert derive_seed(1, 2) != derive_seed(2, 1)


def test_a_state_of_a_gpu_is_loaded_on_the_cpu_with_a_note() -> None:
    cpu = torch.device("cpu")
    with preserve_rng_state():
        saved = random_state(cpu) | {"cuda": torch.zeros(16, dtype=torch.uint8)}
        (note,) = load_random_state(saved, cpu)
    assert "saved on a GPU and goes on on the CPU" in note


def test_random_state_comes_back_as_it_was() -> None:
    with preserve_rng_state():
        seed_all(5)
        random.gauss(0, 1)
        np.random.randn()
        saved = random_state(torch.device("cpu"))
        expected = torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn()
        assert load_random_state(saved, torch.device("cpu")) == []
        assert (torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn()) == expected
