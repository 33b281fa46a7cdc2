"""A worker that is killed, in every phase: the job ends, says who was killed, and leaves no process behind."""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
from between import PHASES, Trouble
from disturbed import trained, trials

from shoal.launch import local


def noted(strategy: str, trouble: Trouble) -> None:
    (trouble.folder / f"rank {os.environ['RANK']}.pid").write_text(str(os.getpid()))
    trained(strategy, trouble)


def alive(folder: Path) -> list[str]:
    pids = {file.name: file.read_text() for file in folder.glob("*.pid")}
    return [name for name, pid in pids.items() if Path("/proc", pid).exists()]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
@pytest.mark.parametrize("seed", trials())
def test_a_killed_worker_ends_the_job_which_says_so(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chance = Random(f"worker {seed}")
    phase = list(PHASES)[seed % len(PHASES)]
    trouble = Trouble(tmp_path, "SIGKILL worker", PHASES[phase], chance.randint(1, 60))
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,shared_memory={str(chance.random() < 0.5).lower()}"
    assert local.run(noted, (strategy, trouble), 2) == 128 + signal.SIGKILL
    assert trouble.mark.exists(), f"nothing happened in {phase}"
    said = capfd.readouterr().err
    assert said.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n")
    assert "Traceback" not in said
    assert len(list(tmp_path.glob("*.pid"))) >= 7  # two ranks, four servers, their arbiter
    deadline_s = time.monotonic() + 20
    while alive(tmp_path):
        assert time.monotonic() < deadline_s, alive(tmp_path)
        time.sleep(0.01)
