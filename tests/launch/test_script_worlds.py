"""Worlds that scripts make at addresses, and in processes, of their own."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import script_world_targets

from shoal.launch import local

SCRIPT = script_world_targets.__file__


def sums(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("sum*.*"))]


def launched(ranks: int, how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of `script_world_targets` under `shoal launch`."""
    command = ["launch", "-n", str(ranks), SCRIPT, how, str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "shoal", *command], capture_output=True, text=True, timeout=240
    )


def test_ranks_meet_at_any_address_and_take_no_port(tmp_path: Path):
    target = script_world_targets.joins_worlds_at_addresses_of_its_own
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # Another job has the port already, and is not met.
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert local.run(target, (str(tmp_path), url), 4) == 0
    assert sums(tmp_path) == ["[4, 4, 1, 4, 4, 2]"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver"])
def test_a_script_that_starts_processes_itself_runs_once(tmp_path: Path, how: str):
    done = launched(1, how, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sums(tmp_path) == ["2", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_script_that_starts_processes_itself_is_refused_when_it_is_started_twice(tmp_path, how):
    done = launched(2, how, tmp_path)
    assert done.returncode == 1
    assert "was made twice, by rank" in done.stderr
    assert (
        "the launcher has started the script 2 times. Start it once, with `python`" in done.stderr
    )


@pytest.mark.slow
def test_processes_of_all_ranks_form_one_world(tmp_path: Path):
    done = launched(2, "spawn in all", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sums(tmp_path) == ["4"] * 4


ENVIRONMENT_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", int(ones))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_older_launcher_of_torch_works_in_a_launched_script(tmp_path: Path):
    (tmp_path / "train.py").write_text(ENVIRONMENT_SCRIPT)
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'torch.distributed.launch', '--nproc_per_node=2']\n"
        "sys.exit(subprocess.run([*command, 'train.py']).returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "launch", "-n", "1", "starts.py"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sum", "2"] * 2
