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
            ("--strategy", "server=2,tensor=2", "-n", 4),
            "strategy server owns whole parameters; under tensor and pipeline no rank has them.",
        ),
        (
            ("--strategy", "ddp,compress=zip", "-n", 2),
            "strategy 'ddp,compress=zip': compression 'zip' is not known",
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
