"""`--slurm` on a real Slurm of four nodes: submitted, stopped, requeued, cancelled."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal.config import to_yaml

pytestmark = pytest.mark.slow
SHOAL = [sys.executable, "-m", "shoal"]
PATIENT = {**MLP, "data.name": "patient"}
SCRIPT = """
import os, sys, time
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]))
distributed.all_reduce(total)
print("sum", total.item(), "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
distributed.barrier()
# Without it torch may abort a rank at its exit, when another has gone before.
distributed.destroy_process_group()
"""


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a blank in its name, from which jobs are submitted."""
    directory = tmp_path / "my jobs"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def shoal(
    cluster: SlurmCluster, *words: object, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    command = [*SHOAL, *map(str, words)]
    return subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=timeout
    )


def submit(cluster: SlurmCluster, *words: object) -> str:
    """Submit a job, and return its id."""
    ended = shoal(cluster, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    job = re.match(r"shoal: job (\d+) is submitted", ended.stdout)
    assert job is not None, ended.stdout
    return job[1]


def end_of(cluster: SlurmCluster, job: str, directory: Path) -> tuple[str, str]:
    """Wait for the end of a job, and return what Slurm knows of it, and its log."""
    wait_for(lambda: not cluster.call("squeue", "-h", "-j", job), timeout=300)
    (log,) = directory.glob(f"*-{job}.out")
    return cluster.call("scontrol", "--oneliner", "show", "job", job), log.read_text()


def wait_for(found: Callable[[], object], timeout: float = 150) -> str:
    limit = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < limit
        time.sleep(0.1)
    return str(value)


def start_now(cluster: SlurmCluster, job: str) -> None:
    """Spare the two minutes that Slurm leaves a requeued job for its nodes' epilogues.

    Its first start must have ended on all nodes: what ends that may end the second one too.
    """
    wait_for(lambda: cluster.call("squeue", "-h", "-j", job, "-o", "%T %r") == "PENDING BeginTime")
    daemons = ("pgrep", "-f", rf"^slurmstepd: \[{job}\.")
    wait_for(lambda: subprocess.run(daemons, capture_output=True, check=False).returncode)
    # Slurm's credentials know whole seconds: one made in the second in which the first start's was
    # revoked counts as revoked, and the job fails ("Job credential revoked").
    time.sleep(2)
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")


def test_a_script_without_shoal_is_one_world_on_four_nodes(
    cluster: SlurmCluster, in_directory: Path
) -> None:
    Path("plain script.py").write_text(SCRIPT)
    job = submit(
        *(cluster, "launch", "--slurm", "--nodes", 4, "--ntasks-per-node", 2, "--time", 10),
        *("--sbatch-option=comment=x", "plain script.py", "--time", "a b"),
    )
    status, log = end_of(cluster, job, in_directory)
    assert "JobState=COMPLETED" in status
    assert log.count("sum 28.0 of 8 ['--time', 'a b']") == 1


def test_the_tasks_of_srun_alone_are_one_world(cluster: SlurmCluster, in_directory: Path) -> None:
    lines = (
        "import shoal, torch",
        "run = shoal.init()",
        "total = shoal.all_reduce(torch.tensor(run.rank + 1), op='sum')",
        "run.print(run.mesh.place.launcher, run.world_size, int(total))",
    )
    Path("script.py").write_text("\n".join(lines))
    told = cluster.call("srun", "-N1", "-n4", sys.executable, "script.py")
    assert "slurm 4 10" in told


def test_more_nodes_than_the_cluster_has_are_refused_and_no_job_waits(
    cluster: SlurmCluster, in_directory: Path
) -> None:
    Path("script.py").write_text(SCRIPT)
    ended = shoal(cluster, "launch", "--slurm", "--nodes", 5, "script.py")
    assert ended.returncode == 2
    assert re.search(r"--nodes 5: partition \S+ has 4$", ended.stderr, re.MULTILINE)
    assert cluster.call("squeue", "-h") == ""


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job that nobody has stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = folder / "job.yaml"
    config.write_text(to_yaml(tiny(folder / "run", PATIENT)))
    # The log goes to the directory from which the job is submitted.
    with contextlib.chdir(folder):
        job = submit(cluster, "train", config, "--slurm", "--nodes", 2)
    status, log = end_of(cluster, job, folder)
    assert "JobState=COMPLETED" in status, f"{status}\n{log}"
    return folder / "run"


def test_a_run_at_its_time_limit_saves_is_requeued_and_ends_with_the_undisturbed_weights(
    cluster: SlurmCluster, in_directory: Path, undisturbed: Path
) -> None:
    config = Path("patient.yaml")
    config.write_text(to_yaml(tiny(in_directory / "run", PATIENT, data__path=str(in_directory))))
    # Step 3 of the first start waits for the signal, which comes 30 to 90 s before the limit.
    command = ("train", config, "--slurm", "--nodes", 2, "--time", 2)
    job = submit(cluster, *command)
    start_now(cluster, job)
    status, out = end_of(cluster, job, in_directory)
    assert "JobState=COMPLETED" in status, f"{status}\n{out}"
    assert "stopped at step 3, and saved; the same command goes on from there" in out
    assert "resumed from" in out
    assert out.count("the job's script ends with exit code 0") == 1
    assert_equal_to_the_bit(everything(in_directory / "run"), everything(undisturbed))


def test_a_preempted_run_saves_and_ends_with_the_undisturbed_weights(
    cluster: SlurmCluster, in_directory: Path, undisturbed: Path
) -> None:
    config = Path("patient.yaml")
    config.write_text(to_yaml(tiny(in_directory / "run", PATIENT, data__path=str(in_directory))))
    job = submit(cluster, "train", config, "--slurm", "--nodes", 2)
    wait_for(lambda: len(list(in_directory.glob("waiting.*"))) == 2)
    urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "true")
    cluster.call("srun", *urgent)
    start_now(cluster, job)
    status, out = end_of(cluster, job, in_directory)
    assert "JobState=COMPLETED" in status, f"{status}\n{out}"
    assert "stopped at step 3, and saved" in out
    assert "resumed from" in out
    assert_equal_to_the_bit(everything(in_directory / "run"), everything(undisturbed))
