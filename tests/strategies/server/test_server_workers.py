"""A worker killed in any phase ends the job, which names it and leaves no process."""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
from fault_injection import trained, trials
from faulty_network import PHASES, Trouble

from tests.harness import local


def noted(strategy: str, trouble: Trouble) -> None:
    (trouble.folder / f"rank {os.environ['RANK']}.pid").write_text(str(os.getpid()))
    trained(strategy, trouble)


def alive(folder: Path) -> list[str]:
    pids = {file.name: file.read_text() for file in folder.glob("*.pid")}
    return [name for name, pid in pids.items() if Path("/proc", pid).exists()]


def ends(folder: Path, signal_name: str, seed: int) -> tuple[int, int]:
    """Return the exit code of a job with a worker that got a signal, and its pid.

    Assert that no process of the job lives.
    """
    chance = Random(f"worker {seed}")
    phase = list(PHASES)[seed % len(PHASES)]
    trouble = Trouble(folder, f"{signal_name} worker", PHASES[phase], chance.randint(1, 60))
    shared_memory = str(chance.random() < 0.5).lower()
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,shared_memory={shared_memory}"
    code = local.run(noted, (strategy, trouble), 2)
    assert trouble.mark.exists(), f"nothing happened in {phase}"
    assert len(list(folder.glob("*.pid"))) >= 7  # two ranks, four servers, their coordinator
    deadline_s = time.monotonic() + 20
    while alive(folder):
        assert time.monotonic() < deadline_s, alive(folder)
        time.sleep(0.01)
    return code, int((folder / "rank 1.pid").read_text())


needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")


@needs_proc
@pytest.mark.parametrize("seed", trials())
def test_a_killed_worker_ends_the_job_which_says_so(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends(tmp_path, "SIGKILL", seed)[0] == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    assert said.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n")
    assert "Traceback" not in said
