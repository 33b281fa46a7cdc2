"""What people type: `--trace` alone, with steps, with wrong ones; `shoal trace` as text
and JSON.
"""

import json
from pathlib import Path

import cli_calls
import pytest
from cli_calls import shoal

TINY = (*cli_calls.TINY, "--train.max_steps", "4")


def test_a_run_is_traced_and_its_trace_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = shoal(capsys, "train", "--trace", "2@1", "digits", *TINY, "--out", tmp_path)
    assert status == 0
    assert f"note: steps 2 to 3 traced: shoal trace {tmp_path}/trace.json" in err
    status, out, _ = shoal(capsys, "trace", tmp_path)
    assert status == 0
    # Columns are as wide as their numbers, which are larger on a busy machine.
    assert "compute communication waiting data optimizer other" in " ".join(out.split())
    told = json.loads(shoal(capsys, "trace", tmp_path / "trace.json", "--json")[1])["result"]
    assert told["steps"] == [2, 3]
    assert told["ranks"]["0"]["compute_s"] > 0
    status, _, err = shoal(capsys, "plot", tmp_path, "-o", tmp_path / "curves.png")
    assert status == 0
    assert f"open {tmp_path}/trace.json in https://ui.perfetto.dev" in err


@pytest.mark.slow
def test_a_run_that_ends_before_its_trace_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, _, err = shoal(capsys, "train", "--trace", "digits", *TINY, "--out", tmp_path)
    assert (
        "no trace was written: it was to be of 3 steps after the first 12, and the run took 4"
        in err
    )
    assert "--trace=1@3" in err
    assert not (tmp_path / "trace.json").exists()


def test_a_run_that_ends_in_its_trace_writes_what_there_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, _, err = shoal(capsys, "train", "digits", *TINY, "--out", tmp_path, "--trace", "50@2")
    assert "steps 3 to 4 traced" in err


@pytest.mark.parametrize("window", ["0", "3@", "3@x", "101", "1@-2"])
def test_steps_that_are_none_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, window: str
) -> None:
    status, _, err = shoal(
        capsys, "train", "digits", f"--trace={window}", "--out", tmp_path / "run"
    )
    assert status == 2
    assert "log.trace must be N or N@S: N steps (1 to 100), after the first S" in err
    assert not (tmp_path / "run").exists()
    script = tmp_path / "script.py"
    script.write_text("")
    status, _, err = shoal(capsys, "launch", "-n", 1, f"--trace={window}", script)
    assert status == 2
    assert f"--trace: '{window}' must be N or N@S" in err


def test_a_directory_without_a_trace_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = shoal(capsys, "trace", tmp_path)
    assert (status, "holds no trace.json" in err) == (2, True)


SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import shoal
from shoal.run.supervised import supervised

run = shoal.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 2)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    optimizer.step()
if run.rank == 0:
    print(sys.argv[1:])
"""


def test_a_script_of_ones_own_is_traced_without_a_line_changed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ("--trace", "2@2", "--trace-to", tmp_path / "out", script, "--trace", "x")
    status, out, err = shoal(capfd, "launch", "-n", 2, *words)
    assert status == 0, err
    assert "['--trace', 'x']" in out
    assert "steps 3 to 4 traced" in err
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["otherData"]["shoal"][
        "steps"
    ] == [3, 4]


def test_a_script_that_ends_too_early_is_told_so(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, _, err = shoal(capfd, "launch", "-n", 2, "--trace", "--trace-to", tmp_path, script)
    assert status == 0
    assert "the run took 6. Trace earlier: --trace=1@5" in err
