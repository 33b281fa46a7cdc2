from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from shoal.errors import DataError, LaunchError
from shoal.testing import world
from tests.harness.waiting import until


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor + dist.get_rank()
    dist.all_reduce(total)
    return total


def rank_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    dist.barrier()


def rank_one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_one_hangs_here() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def rank_one_leaves() -> None:
    if dist.get_rank() == 1:
        sys.exit(3)


def waits_for(path: Path) -> int:
    (path.parent / f"waiting{dist.get_rank()}").touch()
    while not path.exists():
        time.sleep(0.01)
    return dist.get_rank()


def loads_with_workers() -> int:
    return sum(
        len(batch[0])
        for batch in DataLoader(TensorDataset(torch.zeros(10)), batch_size=3, num_workers=1)
    )


def prints() -> None:
    print("on stdout")
    print("on stderr", file=sys.stderr)


def lacks_data() -> None:
    raise DataError("data/x is not there")


def libraries_to_take_down() -> int:
    alive = [f.peek()[0] for f in [*weakref.finalize._registry] if f.atexit]
    return sum(isinstance(owner, torch.library.Library) for owner in alive)


def test_every_rank_returns_its_value_and_tensors_travel_both_ways():
    values = world.run(3, reduced, torch.ones(2, dtype=torch.float64))
    assert [value.tolist() for value in values] == [[6.0, 6.0]] * 3


def test_a_world_of_one_is_a_world_too():
    assert world.run(1, reduced, torch.zeros(1)) == [torch.zeros(1)]


def test_the_rank_that_failed_first_is_raised_with_its_traceback():
    with pytest.raises(LaunchError, match="rank 1 of 3 failed: ValueError: no such luck") as error:
        world.run(3, rank_one_fails)
    assert 'raise ValueError("no such luck")' in str(error.value)
    assert str(error.value).endswith("ValueError: no such luck")


def test_a_rank_that_dies_is_named_with_the_signal_and_not_the_peers_that_lost_it():
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        world.run(2, rank_one_dies)


def test_ranks_that_hang_are_named_with_their_stacks_and_are_gone_afterwards():
    with world.start(2, rank_one_hangs_here, timeout_s=2) as handle:
        with pytest.raises(LaunchError, match="rank 1 of 2 had not finished after 2 s") as error:
            handle.results()
        assert "in rank_one_hangs_here" in str(error.value)
        assert not any(Path(f"/proc/{pid}").exists() for pid in handle.pids)


def test_a_rank_that_leaves_early_gives_no_values():
    with pytest.raises(LaunchError, match="rank 1 of 2 ended with exit code 3"):
        world.run(2, rank_one_leaves)


def test_a_test_can_kill_one_rank_and_the_others_go_on(tmp_path):
    with world.start(3, waits_for, tmp_path / "go") as handle:
        until(lambda: len(list(tmp_path.glob("waiting*"))) == 3)
        handle.kill(1)
        (tmp_path / "go").touch()
        assert handle.wait() == [0, -signal.SIGKILL, 0]


def test_leaving_the_context_kills_what_still_runs(tmp_path):
    with world.start(2, waits_for, tmp_path / "never") as handle:
        pids = handle.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_may_start_data_loader_workers():
    assert world.run(2, loads_with_workers) == [10, 10]


def test_what_ranks_print_carries_their_rank(capsys):
    world.run(2, prints)
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["[rank 0] on stdout", "[rank 1] on stdout"]
    assert sorted(printed.err.splitlines()) == ["[rank 0] on stderr", "[rank 1] on stderr"]


def test_an_error_of_ours_is_shown_without_a_traceback():
    with pytest.raises(LaunchError, match=r"^data/x is not there$"):
        world.run(1, lacks_data)


def test_a_function_without_a_name_cannot_be_sent():
    with pytest.raises(LaunchError, match="at the top of a module"):
        world.run(2, lambda: None)


def test_a_rank_of_a_test_ends_without_taking_torchs_operators_down():
    assert libraries_to_take_down() > 100
    assert world.run(1, libraries_to_take_down) == [0]
