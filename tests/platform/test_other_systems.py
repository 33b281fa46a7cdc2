"""Another system than Linux, by a Python that has nothing of what only Linux has: one process, and
several that torchrun has started over Gloo. Everything else is refused in one sentence.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """\
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

run = shoal.init(sys.argv[1], seed=0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(32, 4)
loader = DataLoader(TensorDataset(rows, torch.arange(32) % 2), 8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    loss = run.forward_backward(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    optimizer.step()
    optimizer.zero_grad()
run.print("loss", float(loss).hex())
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def output(directory: Path, *words: str, status: int = 0) -> str:
    """Return what Python prints in `directory` on a system that is not Linux."""
    path = os.pathsep.join([str(HERE / "other_system"), str(HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(directory)}
    (directory / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == status, ended.stdout
    return ended.stdout


def loss(printed: str) -> float:
    """Return the loss that the script has printed."""
    found = re.search(r"^loss (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return float.fromhex(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero1", "zero3", "tensor=2", "pipeline=2"],
)
def test_ranks_that_torchrun_starts_have_the_loss_of_one_process(strategy, tmp_path):
    alone = loss(output(tmp_path, "train.py", "single"))
    assert loss(output(tmp_path, *TORCHRUN, "train.py", strategy)) == pytest.approx(
        alone, rel=1e-12
    )


def test_one_process_trains_an_experiment(tmp_path):
    words = ("--model.name", "mlp", "--train.max_steps", "1", "--log.tensorboard", "false")
    printed = output(tmp_path, "-m", "shoal", "train", "digits", "--out", "run", *words)
    assert re.search(r"^steps +1$", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("launch", "-n", "2", "train.py", "ddp"), 1),
        (("train", "digits", "-n", "2", "--out", "run"), 1),
        (("verify", "train.py", "-n", "2"), 2),
    ],
    ids=["launch", "train", "verify"],
)
def test_a_command_that_starts_ranks_names_torchrun(words, status, tmp_path):
    printed = output(tmp_path, "-m", "shoal", *words, status=status)
    assert (
        "Shoal starts ranks on Linux alone, and this is darwin. Start them by torchrun" in printed
    )


WINDOWS = """\
import sys

for name in ("fcntl", "grp", "pwd", "resource"):
    sys.modules[name] = None
sys.platform = "win32"
"""
"""Hides what Windows lacks, as far as `import shoal` may look for it."""


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["-m", "shoal", "--help"], "shoal: "),
        (["-c", "import sys; sys.argv[0] = 'C:/shoal.exe'; import shoal.cli"], "shoal: "),
        (["-c", "import shoal"], "ImportError: "),
    ],
    ids=["module", "command", "script"],
)
def test_windows_is_answered_by_one_sentence(words, begin, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WINDOWS)
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert said[-1] == f"{begin}Shoal does not run on Windows itself. Use WSL, and install it there"
    assert (len(said) == 1) == (begin == "shoal: ")


@pytest.mark.slow
def test_parameter_servers_are_refused(tmp_path):
    printed = output(tmp_path, *TORCHRUN, "train.py", "server=1", status=1)
    assert "strategy server starts its servers on Linux alone, and this is darwin" in printed
    assert "Use ddp or zero1." in printed
