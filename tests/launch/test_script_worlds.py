"""Worlds that scripts make at addresses, and in processes, of their own, are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import os, sys
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, *where):
    dist.init_process_group("gloo", *where, rank=rank, world_size=2)

if __name__ == "__main__":
    if sys.argv[1] == "tcp":
        work(int(os.environ["RANK"]), "tcp://127.0.0.1:29500")
    elif sys.argv[1] == "port":
        os.environ["MASTER_PORT"] = "12355"
        work(int(os.environ["RANK"]))
    elif sys.argv[1] == "spawn":
        mp.spawn(work, nprocs=2)
    else:
        child = mp.get_context("fork").Process(target=work, args=(0,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ("tcp", "init_method='tcp://127.0.0.1:29500?"),
        ("port", "MASTER_ADDR and MASTER_PORT are 127.0.0.1:12355: "),
        ("spawn", "torch.multiprocessing.spawn: "),
        ("fork", "init_process_group in a process that a rank has started: "),
    ],
)
def test_a_world_of_a_script_is_refused_with_the_cure(how: str, asked: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "launch", "-n", "2", "train.py", how],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == (1 if how == "fork" else 2), done.stderr
    assert asked in done.stderr
    assert "the launcher has started the script 2 times" in done.stderr
    assert "or start the script once, with `python`" in done.stderr
