"""Commands that cannot be carried out say so before anything starts, and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import TINY, in_a_world_of_two, shoal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--strategy", "zero3,hybrid=3", "-n", 4),
            "4 ranks do not make whole groups. Use a divisor of 4.",
        ),
        (
            ("--strategy", "single", "-n", 2),
            "strategy single trains on one rank; there are 2. Use ddp",
        ),
        (
            ("--strategy", "ddp,compress=zip", "-n", 2),
            "strategy 'ddp,compress=zip': compression 'zip' is not known",
        ),
        (
            ("--optimizer.in_backward", "true", "-n", 2),
            "optimizer.in_backward was removed; it lowered no peak: strategy zero2",
        ),
        (
            ("--optimizer.name", "Adafactor", "--strategy", "zero3", "-n", 2),
            "Adafactor needs whole parameters",
        ),
    ],
)
def test_what_so_many_ranks_cannot_do_is_said_without_torch_or_a_directory(
    tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    program = (
        "import sys\nfrom shoal import cli\n"
        "try: cli.main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "train",
        "digits",
        *map(str, words),
        "--out",
        str(tmp_path / "run"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_model_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys\nfrom shoal import cli\n"
        "try: cli.main(['plan-tensor', 'stdlib_gpt', '--model.name', 'nope'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "there is no model 'nope'; known: botnet50" in ended.stderr


def test_all_bad_settings_are_named_at_once_with_file_line_and_guess(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: digits\noptimizer:\n  lerning_rate: 0.1\ntrain:\n  epochs: many\n")
    status, _, err = shoal(capsys, "train", file, "--train.batch_size", "-3", "--sed", 1)
    assert status == 2
    assert f"{file}:3: optimizer.lerning_rate" in err
    assert f"{file}:5: train.epochs" in err
    assert "train.batch_size" in err
    assert "did you mean 'seed'" in err


def test_a_flag_without_a_value_and_a_missing_name_are_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "flag --seed: a value is missing" in shoal(capsys, "train", "digits", "--seed")[2]
    status, _, err = shoal(capsys, "train")
    assert status == 2
    assert "one NAME_OR_YAML is needed; there is none. Built in: cifar10_resnet18" in err
    assert "did you mean 'digits'" in shoal(capsys, "train", "digit")[2]


@pytest.mark.parametrize("word", ["train.epochs=3", "seed=1", "strategy=server=2"])
def test_a_setting_without_dashes_is_told_how_it_is_written(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    for words in (["digits", word, "-n", 2], ["digits", "-n", 2, "--strategy", "ddp", word]):
        status, _, err = shoal(capsys, "train", *words)
        assert status == 2
        assert f"'{word}': a setting begins with two dashes: --{word}" in err


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_are_too_few(
    capsys: pytest.CaptureFixture[str], processes: int, tmp_path: Path
) -> None:
    status, _, err = shoal(capsys, "train", "digits", "-n", processes, "--out", tmp_path / "run")
    assert status == 2
    assert f"argument -n/--processes: {processes} must be from 1 to 1024" in err
    assert not (tmp_path / "run").exists()


def test_a_world_of_another_size_than_asked_for_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_a_world_of_two(monkeypatch)
    status, _, err = shoal(capsys, "train", "digits", "-n", 4, "--out", tmp_path / "run")
    assert status == 2
    assert "4 processes were asked for, but this is a world of 2" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-n", 2, "--restarts", -1), "argument --restarts: -1 must be from 0 to 1000000"),
        (
            ("--restarts", 3),
            "starts no process (no launcher's variables are set). Give -n 1 as well",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[object, ...], said: str
) -> None:
    status, _, err = shoal(capsys, "train", "digits", "--out", tmp_path / "run", *words)
    assert status == 2
    assert said in err
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_run_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for words in (("eval", tmp_path), ("plot", tmp_path), ("train", "digits", "--out", tmp_path)):
        status, _, err = shoal(capsys, *words)
        assert status == 2
        assert str(tmp_path) in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_start_that_fails_leaves_no_run_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, _, err = shoal(
        capsys, "train", "cifar10_resnet18", "--out", out, "--data.path", tmp_path / "nothing"
    )
    assert status == 2
    assert "cifar-10" in err
    assert "Traceback" not in err
    assert shoal(capsys, "train", "digits", "--out", out, *TINY)[0] == 0


def test_a_refused_run_leaves_no_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "mine"
    for words in (
        ("--model.name", "residual_cnm"),
        ("--data.name", "digit"),
        ("--model.weights", tmp_path / "none.pt"),
    ):
        assert shoal(capsys, "train", "digits", "--out", out, *words)[0] == 2
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_said_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = shoal(
        capsys, "train", "digits", "--model.name", "resnet18", "--out", tmp_path / "file" / "run"
    )
    assert status == 2
    assert (
        f"{tmp_path / 'file/run'} cannot be written: {tmp_path / 'file'} is no directory. Choose "
        "another --out" in err
    )


NOT_DIVISIBLE = """\
import torch
from torch import nn
class Bare(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_classes, 64))
    def forward(self, x):
        return x.flatten(1) @ self.weight.t()
models = {"bare": Bare}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "message"),
    [("tensor=2", "nothing of this model can be cut"), ("pipeline=2", "places between blocks")],
)
def test_a_model_that_a_strategy_refuses_on_the_ranks_ends_with_status_2(
    tmp_path: Path, strategy: str, message: str
) -> None:
    (tmp_path / "bare.py").write_text(NOT_DIVISIBLE)
    words = ("train", "digits", "-n", "2", "--strategy", strategy, "--import", "bare.py")
    command = [sys.executable, "-m", "shoal", *words, "--model.name", "bare", "--out", "run"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count(message) == 1
    assert "Traceback" not in ended.stderr
