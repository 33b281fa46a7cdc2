"""`shoal scale RUN N`: a run has another number of processes from one step to the next, and the
same numbers.
"""

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import MLP, metrics, tiny

from shoal import cli
from shoal.config import to_yaml
from shoal.launch.control_channel import NAME
from shoal.testing import world

DOUBLE = {**MLP, "train.precision": "fp64"}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run on one rank that is left alone has measured."""
    directory = tmp_path_factory.mktemp("one") / "run"
    tiny_jobs.trains(tiny(directory, DOUBLE))
    return metrics(directory)


class Scaling(threading.Thread):
    """Gives `shoal scale RUN N` for each N, once the run waits in the middle of an epoch."""

    def __init__(self, folder: Path, wanted: list[int]) -> None:
        super().__init__(daemon=True)
        self.folder, self.wanted = folder, wanted
        self.answers: list[tuple[int, str]] = []
        self.run_ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.can_be_called() and not self.run_ended.wait(0.01):
            pass
        for processes in self.wanted:
            command = [
                sys.executable,
                "-m",
                "shoal",
                "scale",
                str(self.folder / "run"),
                str(processes),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.answers.append((done.returncode, done.stdout + done.stderr))

    def can_be_called(self) -> bool:
        """Rank 0 waits, and the launcher has seen that the directory is its own."""
        return any(self.folder.glob("waiting.*")) and (self.folder / "run" / NAME).exists()


CASES = {
    "ddp": (2, [3], []),
    "server=2,part_mb=0.0001": (2, [3], []),
    "zero3": (3, [1], []),
    "zero1": (1, [2], []),
    "zero3,hybrid=2": (
        2,
        [0, 2, 3, 4],
        ["0 must be from 1 to 1024", "it has 2 processes already", "Use a divisor of 3"],
    ),
}


EVERY_DAY = ("zero3",)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[] if name in EVERY_DAY else [pytest.mark.slow]) for name in CASES],
)
def test_each_remaining_sample_comes_once_with_the_losses_of_one_run(
    tmp_path: Path,
    on_one_rank: list[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
    strategy: str,
) -> None:
    ranks, wanted, refused = CASES[strategy]
    job = tiny(
        tmp_path / "run", DOUBLE, strategy=strategy, data__name="seen", data__path=str(tmp_path)
    )
    (tmp_path / "job.yaml").write_text(to_yaml(job))
    scaling = Scaling(tmp_path, wanted)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", str(tmp_path / "job.yaml"), "-n", str(ranks)])
    scaling.run_ended.set()
    scaling.join()
    said = capfd.readouterr()
    assert stop.value.code == 0, said.err
    for (code, answer), reason in zip(scaling.answers, refused, strict=False):
        assert (code, reason in answer) == (2, True), answer
    code, answer = scaling.answers[-1]
    assert code == 0, answer
    assert f"{ranks} processes stop and save\n" in answer
    assert f"{wanted[-1]} go on, from the checkpoint of step " in answer
    assert f"= {wanted[-1]} rank" in said.out  # the new ranks spell the batch
    seen = (tmp_path / "seen").read_text().split()
    everyone = Counter({str(sample): 1 for sample in range(30)})
    assert [Counter(seen[start : start + 30]) for start in (0, 30, 60)] == [everyone] * 3
    assert len(seen) == 90
    found, expected = metrics(tmp_path / "run"), [dict(record) for record in on_one_rank]
    assert [record.pop("loss") for record in found] == pytest.approx(
        [r.pop("loss") for r in expected], rel=1e-10
    )
    assert found == expected


def test_a_directory_without_a_run_or_a_launcher_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["scale", str(tmp_path), "2"])
    assert "is no run directory" in capsys.readouterr().err
    tiny_jobs.trains(tiny(tmp_path / "run", MLP))
    with pytest.raises(SystemExit, match="1"):
        cli.main(["scale", str(tmp_path / "run"), "2"])
    said = capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["scale", str(tmp_path / "run"), "9"])
    assert "9 processes and a batch of 8: some would have no sample" in capsys.readouterr().err
    # Two of these sixteen compute one sample, each a stage.
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "divided", MLP, strategy="pipeline=2"))
    with pytest.raises(SystemExit, match="1"):
        cli.main(["scale", str(tmp_path / "divided"), "16"])
    assert f"no launcher on this machine has {tmp_path / 'run'}: nobody trains in it" in said
