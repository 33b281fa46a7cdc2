"""Files that a script writes behind its loop are compared with those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal

SCRIPT = """
import os, sys
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
import shoal

class Net(torch.nn.Linear):
    def save_pretrained(self, directory, state_dict):
        os.makedirs(directory, exist_ok=True)
        save_file(state_dict, f"{directory}/model.safetensors")

run = shoal.init()
data = DataLoader(torch.arange(48.0).view(16, 3).sin(), batch_size=8)
model = Net(3, 1)
model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
for x in data:
    run.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if run.world_size > 1 and "bug" in sys.argv:
    with torch.no_grad():
        model.bias.add_(1.0)
if "weights" in sys.argv:
    weights = run.weights()
    if run.rank == 0:
        save_file(weights, "out.safetensors")
else:
    run.save_pretrained("out")
"""


@pytest.mark.parametrize(
    ("words", "name"), [((), "out/model.safetensors"), (("weights",), "out.safetensors")]
)
def test_a_file_that_is_saved_behind_the_last_step_is_compared(
    words: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    right = shoal.verify_script("train.py", words, ranks=2, strategy="ddp", steps=2)
    assert (right.verdict, right.steps, right.files) == ("exact", 2, 1)
    assert "2 ranks, 2 steps and 1 file: exact" in str(right)
    wrong = shoal.verify_script("train.py", (*words, "bug"), ranks=2, strategy="ddp", steps=2)
    assert wrong.verdict == "differs"
    assert wrong.first is not None
    assert (wrong.first.phase, wrong.first.parameter) == ("files", name)
