"""The example on a model of transformers, under strategies; needs `pip install shoal[hf]`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.platform.torchvision_import import load

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2.py"
PAGE = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
# torchvision of this machine may be of another torch, which transformers would stumble over.
WRAPPER = """\
import runpy, sys
import shoal.platform.torchvision_import
runpy.run_path({example!r}, run_name="__main__")
"""


def losses(directory: Path, strategy: str, ranks: str) -> dict[int, float]:
    """Run the example as people do, and return its losses by epoch."""
    script = directory / "wrapper.py"
    script.write_text(WRAPPER.format(example=str(EXAMPLE)))
    command = [str(Path(sys.executable).with_name("shoal")), "launch", "-n", ranks]
    ended = subprocess.run(
        [*command, "--strategy", strategy, str(script), str(directory)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"^epoch (\d)  loss (\S+)$", ended.stdout, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


@pytest.mark.limit(600)
@pytest.mark.parametrize(("strategy", "ranks", "second", "third"), ROWS)
def test_the_example_has_the_losses_of_the_page_resumes_and_is_read_by_transformers(
    tmp_path: Path, strategy: str, ranks: str, second: str, third: str
) -> None:
    load()
    from transformers import GPT2LMHeadModel

    found = losses(tmp_path, strategy, ranks)
    assert [found[2], found[3]] == pytest.approx([float(second), float(third)], rel=1e-4)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    tokens = model.generate(torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 4)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000009")  # as if killed in the last epoch
    again = losses(tmp_path, strategy, ranks)
    assert again == {3: found[3]}


def test_the_page_has_a_row_for_each_kind_of_strategy() -> None:
    assert [row[0] for row in ROWS] == [
        "single",
        "ddp",
        "zero3",
        "tensor=2",
        "pipeline=2",
        "server=1",
    ]
