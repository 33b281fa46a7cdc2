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

def at_another_port():
    os.environ["MASTER_PORT"] = "12355"
    work(int(os.environ["RANK"]))

if __name__ == "__main__":
    if sys.argv[1] == "fork":
        child = mp.get_context("fork").Process(target=work, args=(0,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    for ask in (
        lambda: work(int(os.environ["RANK"]), "tcp://127.0.0.1:29500"),
        lambda: mp.spawn(work, nprocs=2),
        at_another_port,
    ):
        try:
            ask()
        except Exception as error:
            print(error, file=sys.stderr)
    ask()
"""


@pytest.mark.parametrize(
    ("how", "refusals", "code"),
    [("any", 3, 2), pytest.param("fork", 1, 1, marks=pytest.mark.slow)],
)
def test_a_world_of_a_script_is_refused_with_the_cure(
    how: str, refusals: int, code: int, tmp_path: Path
):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "launch", "-n", "2", "train.py", how],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stderr
    cure = "the launcher has started the script 2 times"
    assert done.stderr.count(cure) >= refusals
    assert "or start the script once, with `python`" in done.stderr
