"""The examples as people run them: the same file with `python` and with `shoal launch`, the
same losses.
"""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(command: list[str], directory: Path) -> list[str]:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "text"])
def test_an_example_prints_the_same_losses_on_one_process_and_on_three(
    name: str, tmp_path: Path
) -> None:
    script, shoal = str(EXAMPLES / f"{name}.py"), str(Path(sys.executable).with_name("shoal"))
    one = printed([sys.executable, script], tmp_path)
    many = printed([shoal, "launch", "-n", "3", script], tmp_path)
    assert one[0].startswith("global batch")
    assert "1 rank" in one[0]
    assert "3 ranks" in many[0]
    assert one[1:] == many[1:]
    assert len(one) > 3
    assert (tmp_path / f"{name}.pt").is_file()


@pytest.mark.parametrize("name", ["digits", "text", "gpt"])
def test_five_lines_of_an_example_speak_to_shoal(name: str) -> None:
    lines = [
        line
        for line in (EXAMPLES / f"{name}.py").read_text().splitlines()
        if not line.startswith(("    python", '"'))
    ]
    calls = ("import shoal", "shoal.init(", "run.prepare(", "run.forward_backward(", "run.save(")
    assert [sum(call in line for line in lines) for call in calls] == [1] * len(calls)
