"""`shoal.verify_script`: loops of users, unchanged, on real processes."""

import json
import re
from pathlib import Path

import pytest

import shoal
from shoal.cli import main
from shoal.errors import LaunchError, UsageError
from shoal.verification.script.script_report import ScriptReport

SCRIPTS = Path(__file__).parent / "verified_scripts"
LOOP, DDP = SCRIPTS / "shoal_loop.py", SCRIPTS / "ddp_loop.py"


def verified(kind: str) -> ScriptReport:
    return shoal.verify_script(DDP, [kind], ranks=2)


def exit_status(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(["verify", *words])
    return end.value.code


def test_a_loop_on_shoal_is_exact_and_draws_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    report = shoal.verify_script(LOOP, ranks=2, strategy="ddp", steps=9, keep=tmp_path)
    assert report.verdict == "exact"
    assert report.exit_code == 0
    assert report.steps == 5
    assert report.largest is not None
    assert report.largest < 1e-12
    assert (tmp_path / "candidate/rank-0/files/0-shoal_loop.pt").exists()
    assert not list(Path().iterdir())  # no file, no checkpoint, no log
    assert [name for name, _, _ in report.layers][:3] == [
        "embedding",
        "blocks.0.norm",
        "blocks.0.up",
    ]


MICROBATCHES = """
import torch
from torch.utils.data import DataLoader
import shoal

run = shoal.init("ddp", accumulate=2)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
data = DataLoader(torch.arange(66.0).view(22, 3).sin(), batch_size=8)
model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
for x in data:
    {step}
    optimizer.step()
    optimizer.zero_grad()
"""
STEPS = {
    "loop": "for part in run.microbatches(x): run.backward(model(part).square().mean())",
    "function": "run.forward_backward(lambda part: model(part).square().mean(), x)",
}


@pytest.mark.parametrize("form", STEPS)
def test_micro_batches_of_ranks_are_those_of_one_process(form: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MICROBATCHES.format(step=STEPS[form]))
    report = shoal.verify_script(script, ranks=2, steps=3)
    assert report.verdict == "exact", str(report)
    assert any(error is not None for _, error, _ in report.layers)


WRITING_SCRIPT = """
import os
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import save_file
import shoal

run = shoal.init("ddp")
model = torch.nn.Linear(3, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
x = run.share(torch.arange(12.0).view(4, 3).sin())
for step in range(2):
    run.forward_backward(lambda x: model(x).square().mean(), x)
    optimizer.step()
    optimizer.zero_grad()
    with open("metrics.csv", "a") as file:
        file.write(f"{step}\\n")
    run.save("model.pt")
    torch.load("model.pt")
if run.rank == 0:
    assert open("metrics.csv").read().startswith("old0\\n")
    with open("report.csv", "r+") as file:
        file.write("new")
    np.save("scores.npy", np.ones(2))
    torch.save({"a": 1}, "rank-0.pt")
    save_file({"a": torch.ones(2)}, "best.safetensors", metadata={"format": "pt"})
    Path("report.txt").write_text("new")
    Path("last.tmp").write_text("new")
    os.replace("last.tmp", "last.txt")
    assert open("report.txt").read() == "new"
"""


def test_files_that_are_there_already_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = ["best.safetensors", "last.txt", "metrics.csv", "report.csv", "report.txt", "scores.npy"]
    for name in old:
        Path(name).write_text("old")
    Path("train.py").write_text(WRITING_SCRIPT)
    assert shoal.verify_script(Path("train.py"), ranks=2).verdict == "exact"
    assert [Path(name).read_text() for name in old] == ["old"] * len(old)
    assert sorted(path.name for path in Path().iterdir()) == sorted([*old, "train.py"])


def test_files_of_a_fresh_directory_are_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = WRITING_SCRIPT.partition("if run.rank")[0]
    Path("train.py").write_text(written)
    assert shoal.verify_script(Path("train.py"), ranks=2).verdict == "exact"


def test_a_loss_that_the_loop_computes_is_proved_exact_or_named_with_its_line() -> None:
    script = SCRIPTS / "loss_in_the_loop.py"
    report = shoal.verify_script(script, ranks=2, strategy="zero3")
    assert report.verdict == "exact", report
    refused = shoal.verify_script(script, ["weights"], ranks=2, strategy="ddp")
    assert refused.verdict == "refused"
    assert "divides by what each rank has counted" in str(refused)
    wrong = shoal.verify_script(script, ["weights", "ranks"], ranks=2, strategy="ddp")
    assert wrong.verdict == "differs"
    assert wrong.first is not None
    assert wrong.first.line == "loss_in_the_loop.py:24"
    assert wrong.cause is not None
    assert wrong.cause.kind == "weights of samples"


def test_a_scale_planted_in_a_loop_without_shoal_is_named_with_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_status(str(DDP), "-n", "2", "--steps", "2", "--json", "--", "one") == 1
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["verdict"] == "differs"
    assert found["first"]["what"] == "step 1, backward, head.bias"
    assert found["first"]["line"] == "ddp_loop.py:26"
    assert found["cause"]["kind"] == "scale"
    assert found["cause"]["factor"] == pytest.approx(2)
    assert [layer["module"] for layer in found["layers"]][-1] == ""


def test_a_script_that_cannot_be_compared_is_an_error_with_its_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError, match=r"there is no script missing\.py"):
        shoal.verify_script("missing.py")
    assert exit_status(str(LOOP), "--train.epochs", "3") == 2
    assert "The script's own words come after --" in capsys.readouterr().err
    assert exit_status("digits", "--keep", "here") == 2
    assert "only for a script" in capsys.readouterr().err
    with pytest.raises(UsageError, match="without a step of an optimizer"):
        shoal.verify_script(DDP, ["idle"], ranks=1)
    with pytest.raises(UsageError, match=r"zero3: .*does not train by Shoal"):
        shoal.verify_script(DDP, ["one"], ranks=1, strategy="zero3", steps=1)
    with pytest.raises(LaunchError, match="ValueError: planted") as crash:
        shoal.verify_script(DDP, ["crash"], ranks=1)
    assert "shoal/verification" not in str(crash.value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "tensor=2", "pipeline=2", "server=1"])
def test_a_loop_on_shoal_is_exact_under(strategy: str) -> None:
    report = shoal.verify_script(LOOP, ranks=2, strategy=strategy)
    assert report.verdict == "exact", str(report)
    assert any(error is not None for _, error, _ in report.layers)


@pytest.mark.parametrize(
    ("library", "named"),
    [
        ("torch", r"by torch \(randn_like at drawing_loop.py:30\)"),
        pytest.param("numpy", "by NumPy", marks=pytest.mark.slow),
    ],
)
def test_random_numbers_that_the_loop_draws_are_the_cause_and_no_defect(
    library: str, named: str
) -> None:
    report = shoal.verify_script(SCRIPTS / "drawing_loop.py", [library], ranks=2, steps=2)
    assert report.verdict == "differs by design", str(report)
    assert report.cause.kind == "random numbers"
    assert re.search(named, report.cause.sentence)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("model", "drawn in decoder, or just before it"),
        pytest.param(
            "loss", "between the model's outputs and the backward", marks=pytest.mark.slow
        ),
    ],
)
def test_random_numbers_of_a_loss_of_the_loop_are_the_cause_and_no_defect(
    place: str, named: str
) -> None:
    report = shoal.verify_script(SCRIPTS / "noisy_model.py", [place], ranks=2, steps=2)
    assert (report.verdict, report.cause.kind) == ("differs by design", "random numbers"), report
    assert named in report.cause.sentence


def test_dropout_of_a_loss_of_the_loop_is_off_in_both_runs() -> None:
    report = shoal.verify_script(SCRIPTS / "noisy_model.py", ["dropout"], ranks=2, steps=2)
    assert report.verdict == "exact", report
    assert any("dropout is off" in note for note in report.notes)


@pytest.mark.slow
def test_layers_of_three_matrices_are_joined_matrix_by_matrix(
    capfd: pytest.CaptureFixture[str],
) -> None:
    report = shoal.verify_script(LOOP, ["attention"], ranks=2, strategy="tensor=2", steps=3)
    assert report.verdict == "exact", str(report)
    compared = {name for name, error, _ in report.layers if error is not None}
    assert "blocks.0.attention.qkv" in compared
    assert "gathers and computes all of it" not in capfd.readouterr().err  # nor would the run


@pytest.mark.slow
def test_strategies_that_do_not_step_together_differ_by_design() -> None:
    report = shoal.verify_script(LOOP, ranks=2, strategy="local=2", steps=4)
    assert report.verdict == "differs by design", str(report)
    assert report.cause.kind == "own steps"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "sharded", "rate"])
def test_a_right_loop_without_shoal_is_exact(kind: str) -> None:
    report = verified(kind)
    assert report.verdict == "exact", str(report)
    assert any("dropout is off" in note for note in report.notes)
    assert any("learning rate depends" in note for note in report.notes) == (kind == "rate")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("mean of means", "weights of samples"),
        ("scale", "scale"),
        ("past the wrapper", "missing reduction"),
        ("apart", "ranks apart"),
        ("partly sharded", "missing reduction"),
        ("no sampler", "same samples"),
    ],
)
def test_an_error_in_a_loop_without_shoal_is_classified(kind: str, cause: str) -> None:
    report = verified(kind)
    assert (report.verdict, report.cause.kind) == ("differs", cause), str(report)


PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.rand(32, 4), batch_size=8):
    optimizer.zero_grad()
    model(input=x).square().mean().backward()
    optimizer.step()
"""


def test_a_script_of_one_process_is_told_how_it_becomes_one_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PLAIN)
    assert exit_status("train.py", "-n", "2") == 2
    out = capsys.readouterr().out
    assert "nothing compared" in out
    assert "the script starts no process group, so each rank trains alone" in out
    assert "Shoal's four lines" in out
