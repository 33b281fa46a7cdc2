"""What workers need of /dev/shm is told before a run, and not by a SIGBUS in it."""

from dataclasses import replace

import pytest
from torch.utils.data import TensorDataset

from shoal.config.job import Job
from shoal.data.source import Source
from shoal.errors import ConfigError
from shoal.train.build import check_shared_memory

MIB = 2**20


def job(workers: int) -> Job:
    made = Job()
    return replace(
        made,
        data=replace(made.data, workers=workers),
        train=replace(made.train, batch_size=96),
        evaluation=replace(made.evaluation, batch_size=32),
    )


def images() -> Source:
    return Source(
        TensorDataset(), TensorDataset(), "classification", 10, (4, 64, 128)
    )  # 128 KiB each


def test_batches_that_do_not_fit_are_refused_with_the_room_they_need() -> None:
    with pytest.raises(
        ConfigError,
        match="from 2 workers of each rank need 80 MiB of /dev/shm, which has 64 MiB free",
    ):
        check_shared_memory(job(workers=2), images(), 64 * MIB)


def test_ranks_on_other_machines_need_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_shared_memory(job(workers=2), images(), 64 * MIB)


@pytest.mark.parametrize(("workers", "free_bytes"), [(2, 80 * MIB), (0, 0), (2, None)])
def test_what_fits_or_needs_no_room_is_taken(workers: int, free_bytes: int | None) -> None:
    check_shared_memory(job(workers), images(), free_bytes)
