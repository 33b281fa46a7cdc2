"""Checkpoints of several ranks: who writes what, who gets what back, and failing together."""

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.checkpoint import Checkpoints, Saved
from shoal.checkpoint.rank_consensus import rank, world_size
from shoal.errors import CheckpointError, UsageError
from shoal.testing import world


def replicated(step: int) -> dict[str, Tensor]:
    weights = {f"layer{i}": torch.arange(1000.0) + step + i for i in range(4)}
    return {**weights, "count": torch.tensor(step)}


def private() -> dict[str, Tensor]:
    """Of another size on every rank."""
    return {"generator": torch.full((rank() + 1,), rank(), dtype=torch.uint8)}


def save(directory: Path, *steps: int) -> None:
    store = Checkpoints(directory)
    for step in steps:
        store.save(step, replicated(step), {"step": step, "rank": rank()}, private())


def load(directory: Path) -> tuple[int | None, bool, dict[str, Tensor], list[str]]:
    """The step, whether all is as it was saved, this rank's own tensors, and what was reported
    here.
    """
    reports: list[str] = []
    loaded = Checkpoints(directory).load(reports.append)
    if loaded is None:
        return None, True, {}, reports
    return loaded.step, is_whole(loaded), loaded.private, reports


def is_whole(loaded: Saved) -> bool:
    expected = replicated(loaded.step)
    same = loaded.tensors.keys() == expected.keys() and loaded.info == {
        "step": loaded.step,
        "rank": 0,
    }
    return same and all(
        torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items()
    )


def save_and_load(directory: Path) -> tuple[bool, bool]:
    save(directory, 1, 2)
    step, whole, own, reports = load(directory)
    same = own.keys() == {"generator"} and torch.equal(own["generator"], private()["generator"])
    return (step, whole, reports) == (2, True, []), same


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_all_that_is_shared_and_what_was_its_own(
    tmp_path: Path, ranks: int
) -> None:
    assert world.run(ranks, save_and_load, tmp_path / "c") == [(True, True)] * ranks
    files = {f"rank-{number:05d}.safetensors" for number in range(ranks)}
    files |= {"index.json", "manifest.json"}
    assert set(os.listdir(tmp_path / "c" / "step-00000002")) == files


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two") / "c"
    world.run(2, save, directory, 1, 2)
    return directory


def test_another_number_of_ranks_gets_what_is_shared_and_nothing_private(
    saved_by_two: Path,
) -> None:
    assert load(saved_by_two) == (2, True, {}, [])
    assert world.run(3, load, saved_by_two) == [(2, True, {}, [])] * 3


def test_all_ranks_load_the_same_earlier_step_and_one_reports(
    tmp_path: Path, saved_by_two: Path
) -> None:
    shutil.copytree(saved_by_two, tmp_path / "c")
    data = tmp_path / "c" / "step-00000002" / "rank-00001.safetensors"
    os.truncate(data, 10)
    (step_0, whole_0, _, reports_0), (step_1, whole_1, _, reports_1) = world.run(
        2, load, tmp_path / "c"
    )
    assert (step_0, whole_0, step_1, whole_1) == (1, True, 1, True)
    assert reports_1 == []
    assert reports_0[0].startswith(f"checkpoint step-00000002 is skipped: {data} should have ")


def save_sharded(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)
    Checkpoints(directory).save(1, {"rows": distribute_tensor(whole, mesh, [Shard(0)])}, {})


def test_sharded_tensors_come_back_whole(tmp_path: Path) -> None:
    world.run(2, save_sharded, tmp_path / "c")
    loaded = Checkpoints(tmp_path / "c").load(pytest.fail)
    assert loaded is not None
    assert torch.equal(loaded.tensors["rows"], torch.arange(35.0).reshape(7, 5))


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """The operating system refuses this process's writes beyond that size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def fail_to_write(directory: Path, failing: int) -> tuple[str, list[str], int | None, int | None]:
    """The error of the second save, what is left of it, and the steps that load before and
    after the third.
    """
    save(directory, 1)
    error = ""
    with no_file_above(2000 if rank() == failing else resource.RLIM_INFINITY):
        try:
            save(directory, 2)
        except CheckpointError as caught:
            error = str(caught)
    dist.barrier()
    left, before = sorted(os.listdir(directory)), load(directory)[0]
    save(directory, 3)
    return error, left, before, load(directory)[0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_harms_nothing(
    tmp_path: Path, failing: int
) -> None:
    outcomes = world.run(2, fail_to_write, tmp_path / "c", failing)
    assert outcomes[0] == outcomes[1]
    error, left, before, after = outcomes[0]
    assert "the checkpoint of step 2 was not saved in" in error
    assert f"rank {failing}: " in error
    assert f"rank {1 - failing}: " not in error
    assert "File too large" in error
    assert (left, before, after) == (["latest", "step-00000001"], 1, 3)


def misuse_on_rank_one(directory: Path) -> str:
    tensors = {"rank7/x": torch.ones(1)} if rank() == 1 else {"x": torch.ones(1)}
    with pytest.raises(UsageError) as caught:
        Checkpoints(directory).save(1, tensors, {})
    return str(caught.value)


def test_misuse_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    errors = world.run(2, misuse_on_rank_one, tmp_path / "c")
    assert errors[0] == errors[1]
    assert "'rank7/x'" in errors[0]


def use_one_each(directories: list[Path]) -> list[str]:
    store = Checkpoints(directories[rank()])
    with pytest.raises(CheckpointError) as at_load:
        store.load(pytest.fail)
    with pytest.raises(CheckpointError) as at_save:
        store.save(2, replicated(2), {})
    return [str(at_load.value), str(at_save.value)]


def test_ranks_that_see_different_directories_are_told(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    save(directories[0], 1)
    Checkpoints(directories[1]).save(1, replicated(2), {"step": 1})
    for errors in world.run(2, use_one_each, directories):
        assert all(
            "rank 1: " in error and "must reach the same directory" in error for error in errors
        )
    assert [sorted(os.listdir(directory)) for directory in directories] == [
        ["latest", "step-00000001"]
    ] * 2
