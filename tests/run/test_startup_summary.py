"""What a run says of itself at its start: the global batch, and a seed that has no effect."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.run.startup_summary import spell_batch
from shoal.testing import world


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulate", "text"),
    [
        (256, 8, 2, "global batch 256 = 8 ranks x 16 x 2 accumulated"),
        (256, 8, 1, "global batch 256 = 8 ranks x 32"),
        (10, 1, 1, "global batch 10 = 1 rank x 10"),
        (10, 4, 1, "global batch 10 = 4 ranks x 2 to 3"),
        (10, 3, 2, "global batch 10 = 3 ranks x 1 to 2 x 2 accumulated"),
    ],
)
def test_the_global_batch_is_spelled_out(
    batch: int, ranks: int, accumulate: int, text: str
) -> None:
    assert spell_batch(batch, ranks, accumulate) == text


def summary(batch_size: int) -> list[str]:
    told: list[str] = []
    run = shoal.init("ddp", announce=told.append)
    net = torch.nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.randn(6, 3)), batch_size=batch_size)
    run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data)
    return told


def summary_on_two_hosts() -> list[str]:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return summary(2)


def test_ranks_on_several_hosts_are_told_what_is_not_encrypted() -> None:
    words = "is not encrypted"
    assert any(words in line for line in world.run(2, summary_on_two_hosts)[0])
    assert not any(words in line for line in world.run(2, summary, 2)[0])


def test_a_process_that_srun_has_not_started_in_a_job_of_several_tasks_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not any("srun" in line for line in summary(2))
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert any("has 2 tasks, and one process trains alone" in line for line in summary(2))


def test_ranks_that_no_batch_has_a_sample_for_are_told() -> None:
    first, *_ = world.run(2, summary, 1)
    assert any("1 have nothing to compute" in line for line in first)
    first, *_ = world.run(2, summary, 2)
    assert not any("nothing to compute" in line for line in first)


def test_more_micro_batches_than_samples_of_a_rank_are_told() -> None:
    run = shoal.init("ddp", accumulate=4, announce=(told := []).append)
    net = torch.nn.Linear(3, 1)
    run.prepare(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        DataLoader(TensorDataset(torch.randn(6, 3)), batch_size=3),
    )
    assert any("so 1 of its micro-batches are empty; accumulate=3 is as good" in x for x in told)


def notes(own: int | None, seed: int) -> list[str]:
    if own is not None:
        torch.manual_seed(own)
    told: list[str] = []
    shoal.init(seed=seed, announce=told.append)
    return [line for line in told if "was seeded by" in line]


@pytest.mark.parametrize(
    ("own", "seed", "is_told"), [(5, 0, True), (None, 0, False), (5, 5, False)]
)
def test_a_seed_that_has_no_effect_is_told_with_the_line_that_gives_it(
    own: int | None, seed: int, is_told: bool
) -> None:
    of_first, of_second = world.run(2, notes, own, seed)
    assert [line for line in of_first if "shoal.init(seed=5)" in line] == of_first
    assert (len(of_first), len(of_second)) == (int(is_told), 0)
