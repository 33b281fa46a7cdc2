"""Real launchers, where this machine has them. torchrun is a part of torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import launcher_environments as recorded
import pytest

from shoal.cli import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MPIRUN = ["mpirun", "--oversubscribe", "-n", "2", sys.executable]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SCRIPT = """
    import shoal
    import sys
    import torch
    from pathlib import Path
    from torch import distributed

    run = shoal.init()
    total = torch.tensor(run.rank + 1)
    distributed.all_reduce(total)
    place = run.mesh.place
    local = f"{place.local_rank}/{place.local_world}"
    Path(sys.argv[1], str(run.rank)).write_text(f"{place.launcher} {local} {total}")
"""


def launched(command: list[str], logs: Path) -> subprocess.CompletedProcess[str]:
    environ = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **AS_ROOT,
        "PET_LOG_DIR": str(logs),
    }  # torchrun's --log-dir
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("torchrun", TORCHRUN),
        pytest.param(
            "mpi",
            MPIRUN,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun"),
            ],
        ),
    ],
)
def test_the_ranks_of_a_launcher_are_one_world(
    tmp_path: Path, launcher: str, command: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended = launched([*command, str(script), str(tmp_path)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "0").read_text() == f"{launcher} 0/2 3"
    assert (tmp_path / "1").read_text() == f"{launcher} 1/2 3"


def test_shoal_launch_is_refused_in_one_of_many_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in recorded.STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        main(["launch", "-n", "2", "train.py"])
    assert stop.value.code == 2
    assert "it is one of 5: step 0 of Slurm job 3" in capsys.readouterr().err
