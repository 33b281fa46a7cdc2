"""What `prepare` takes, what it says before the first step, and errors with a cure where that
would go wrong.
"""

import pytest
import torch
import torch.nn.functional as F
from minimal_script import data, parts, quiet
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import shoal
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world


def test_the_header_spells_the_global_batch() -> None:
    said: list[str] = []
    shoal.init(announce=said.append, accumulate=2).prepare(*parts())
    assert said == ["global batch 4 = 1 rank x 2 x 2 accumulated"]


def test_batch_norm_and_dropout_are_named_if_ranks_would_differ() -> None:
    said: list[str] = []
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3)).double()
    shoal.init(announce=said.append, accumulate=2).prepare(*parts(model))
    assert [line.split()[1] for line in said[1:]] == ["BatchNorm", "dropout"]


def test_a_second_prepare_is_an_error() -> None:
    run = quiet()
    run.prepare(*parts())
    with pytest.raises(UsageError, match="has prepared a model already"):
        run.prepare(*parts())


def test_an_optimizer_that_lost_a_parameter_is_named() -> None:
    model, _, loader = parts()
    with pytest.raises(
        UsageError, match=r"bias: trainable, but in no group.*requires_grad_\(False\)"
    ):
        quiet().prepare(model, torch.optim.SGD([model.weight], lr=0.1), loader)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _, loader = parts()
    with pytest.raises(UsageError, match="do not belong to the model"):
        quiet().prepare(model, torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1), loader)


def test_a_frozen_parameter_may_be_in_the_optimizer_and_never_moves() -> None:
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    run = quiet()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    assert torch.equal(model.bias, before)


def test_a_parameter_unfrozen_after_prepare_is_named() -> None:
    run = quiet()
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    model.bias.requires_grad_(True)
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match="bias: unfrozen after prepare"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


class Endless(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield torch.ones(4), 0


def test_an_iterable_dataset_is_refused_with_the_cure() -> None:
    model, optimizer, _ = parts()
    with pytest.raises(UsageError, match=r"Endless is an IterableDataset.*map-style"):
        quiet().prepare(model, optimizer, DataLoader(Endless(), batch_size=2))


def test_a_batch_sampler_is_refused_with_the_cure() -> None:
    class Own(BatchSampler):
        pass

    model, optimizer, _ = parts()
    loader = DataLoader(data(), batch_sampler=Own(SequentialSampler(data()), 2, False))
    with pytest.raises(UsageError, match=r"batch_sampler of its own.*sampler=\.\.\."):
        quiet().prepare(model, optimizer, loader)


def test_a_distributed_sampler_is_refused_with_the_cure() -> None:
    from torch.utils.data.distributed import DistributedSampler

    model, optimizer, _ = parts()
    sampler: DistributedSampler = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(
        UsageError, match=r"DistributedSampler, which gives every rank other samples.*shuffle=True"
    ):
        quiet().prepare(model, optimizer, DataLoader(data(), batch_size=2, sampler=sampler))


def test_accumulation_without_a_loader_is_refused() -> None:
    model, optimizer, _ = parts()
    with pytest.raises(UsageError, match="accumulate splits what the loader shares out"):
        shoal.init(accumulate=2, announce=lambda _: None).prepare(model, optimizer)


def test_an_unknown_strategy_and_an_unknown_option_are_named() -> None:
    with pytest.raises(shoal.ShoalError, match="'dpp' is not known; did you mean 'ddp'"):
        shoal.init("dpp")
    with pytest.raises(
        shoal.ShoalError, match="option 'unsed' is not known; did you mean 'unused'"
    ):
        shoal.init("ddp,unsed=true")


def single_in_a_world_of_two() -> None:
    shoal.init("single", announce=lambda _: None).prepare(*parts())


def test_single_refuses_a_world_of_two() -> None:
    with pytest.raises(LaunchError, match="single trains on one rank; there are 2"):
        world.run(2, single_in_a_world_of_two)


def test_ddp_refuses_a_model_without_trainable_parameters() -> None:
    model, optimizer, loader = parts()
    model.requires_grad_(False)
    with pytest.raises(StrategyRefused, match="no trainable parameter"):
        quiet().prepare(model, optimizer, loader)


def own_group_of_another_size() -> None:
    import os

    os.environ.update(
        WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SHOAL_EXPECTED_WORLD="1"
    )
    shoal.init()


def test_a_process_group_that_contradicts_the_environment_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"process group says rank . of 2, the environment"):
        world.run(2, own_group_of_another_size)


def rank_dependent_start() -> Tensor:
    run = quiet()
    torch.manual_seed(run.rank)
    model, _, _ = run.prepare(*parts(nn.Linear(4, 3).double()))
    weight: Tensor = model.weight.detach().clone()
    return weight


def test_every_rank_starts_from_rank_0s_weights() -> None:
    first, second = world.run(2, rank_dependent_start)
    assert torch.equal(first, second)
