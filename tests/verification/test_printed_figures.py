"""Figures that a script prints are compared with those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.verification.script.printed_figures import FILE, other_figures

SCRIPT = """
import torch
from torch.utils.data import DataLoader
import shoal

run = shoal.init("ddp")
model = torch.nn.Linear(3, 1)
data = DataLoader(torch.arange(48.0).view(16, 3).sin(), batch_size=8)
model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
for x in data:
    loss = run.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    seen = torch.tensor(float(len(x)))
    {share}
    run.print(f"loss {{loss:.6f}} of {{seen:.0f}} in 0.{{run.rank}}7 s on {{run.world_size}}")
"""
OWN, ALL = "pass", 'seen = shoal.all_reduce(seen, op="sum")'


@pytest.mark.parametrize(("share", "is_noted"), [(OWN, True), (ALL, False)])
def test_a_sum_over_own_samples_that_a_script_prints_is_noted(
    share: str, is_noted: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(share=share))
    report = shoal.verify_script(tmp_path / "train.py", ranks=2, steps=3)
    assert report.verdict == "exact"
    (note,) = report.notes or [""]
    assert ("rank 0 prints other figures than one process: 'loss" in note) == is_noted
    assert ("of 4 in 0.07 s on 2', there 'loss" in note) == is_noted


def note(tmp_path: Path, ranks: str, alone: str) -> str:
    folders = tmp_path / "candidate", tmp_path / "reference"
    for folder, text in zip(folders, (ranks, alone), strict=True):
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_text(text)
    return other_figures(folders[1], folders[0], 2)


@pytest.mark.parametrize(
    ("ranks", "alone"),
    [
        ("loss 2.3047", "loss 2.3048"),  # the last digit is rounded
        ("loss 1.25e-03", "loss 1.26e-03"),
        ("3.1 s, 812.5 samples/s, 00:31, time: 4.5", "5.9 s, 412.0 samples/s, 01:02, time: 8.1"),
        ("2 ranks", "1 ranks"),
        ("torch 2.13.0 on worker3", "torch 2.11.0 on worker4"),
        ("begins\\nloss 1.0", "loss 1.0"),
        ("seed 7", ""),
    ],
)
def test_figures_that_are_equal_or_of_the_clock_get_no_note(
    ranks: str, alone: str, tmp_path: Path
) -> None:
    assert not note(tmp_path, ranks, alone)


def test_three_lines_are_told_and_the_others_counted(tmp_path: Path) -> None:
    lines = [f"epoch {epoch} acc 50.{epoch}%" for epoch in range(5)]
    told = note(tmp_path, "\n".join(lines), "\n".join(lines).replace("50", "90"))
    assert "'epoch 0 acc 50.0%', there 'epoch 0 acc 90.0%'; 'epoch 1" in told
    assert "epoch 2" in told
    assert "; and 2 lines more. What a loop" in told
    assert "epoch 3" not in told
