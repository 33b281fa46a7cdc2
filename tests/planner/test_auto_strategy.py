"""`--strategy auto`: the choice is told with its reason, and a run that goes on keeps it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli import program
from shoal.config import read, to_yaml
from shoal.config.job import Job
from shoal.planner.auto_strategy import choose
from shoal.strategies import parse_line
from shoal.train.run_directory import CONFIG


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = [("model.options", "{widths: [8, 16]}"), ("out", str(tmp_path / "run"))]
    return read("digits", [*flags, ("strategy", "auto")]).job


def test_the_choice_is_a_line_with_its_reason(job: Job) -> None:
    line, reason = choose(job, 2)
    parse_line(line)
    assert reason.startswith(f"strategy auto: {line}: ")
    assert "a step predicted" in reason


def test_a_run_that_goes_on_keeps_its_strategy(job: Job) -> None:
    directory = Path(job.directory)
    directory.mkdir()
    (directory / CONFIG).write_text(to_yaml(replace(job, strategy="zero3")))
    line, reason = choose(job, 2)
    assert line == "zero3"
    assert "as the run in" in reason


SCRIPT = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import shoal

run = shoal.init()
model = torch.nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), batch_size=4)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for x, y in loader:
    optimizer.zero_grad()
    for x, y in run.microbatches((x, y)):
        run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
run.print("trained", run.world_size)
"""


def test_the_launcher_chooses_for_a_script_and_starts_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "--strategy", "auto", "--accumulate", "2"]
    with pytest.raises(SystemExit) as ended:
        program.main([*words, str(tmp_path / "train.py")])
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    assert printed.err.count("strategy auto: ") == 1
    assert "a step predicted" in printed.err
    assert printed.out.count("trained 2") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [([], 1), (["-m", "torch.distributed.run", "--nproc-per-node", "2"], 2)],
    ids=["plain", "torchrun"],
)
def test_a_script_that_asks_for_auto_gets_one_choice_for_all_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: list[str], ranks: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(SCRIPT.replace("shoal.init()", 'shoal.init("auto")'))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a directory there
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("strategy auto: ") == 1
    assert "NOT CALIBRATED" in done.stdout
    assert done.stdout.endswith(f"trained {ranks}\n")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(
            *("import shoal; shoal.init('auto')", "it follows a script from its file"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import sys; sys.argv = ['ends.py']; import shoal; shoal.init('auto')",
            "backward pass",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_followed_is_told_by_auto(tmp_path: Path, script: str, error: str) -> None:
    (tmp_path / "ends.py").write_text("import torch\n")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert error in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-n", "2", "--strategy", "auto", "-m", "package.train"], "chooses for a file and ranks"),
        (["--hosts", "a,b", "--strategy", "auto", "train.py"], "chooses for a file and ranks"),
        (["-n", "2", "--strategy", "auto", "none.py"], "none.py"),
        (["-n", "2", "--strategy", "auto", "ends.py"], "ended without a backward pass"),
        (["-n", "2", "--strategy", "auto,zero1", "ends.py"], "auto stands alone"),
    ],
)
def test_the_launcher_refuses_to_choose_without_a_script_to_follow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text("import torch\n")
    with pytest.raises(SystemExit) as ended:
        program.main(["launch", *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_ranks_of_another_launcher_do_not_choose_each_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(SystemExit) as ended:
        program.main(["train", "digits", "--strategy", "auto"])
    assert ended.value.code == 2
    assert "every rank would choose by itself" in capsys.readouterr().err
