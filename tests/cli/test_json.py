"""`--json` of every verb prints one object of the same form, for errors too."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_calls import TINY, shoal

import shoal as package
from shoal.cli import program

WITHOUT_RESULT = {"launch", "completion"}


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    """Run a command with --json; return its status, the object, and stderr."""
    code, out, err = shoal(capsys, *words, "--json")
    (line,) = out.splitlines()
    read = json.loads(line)
    assert (read["shoal"], read["verb"]) == (package.__version__, words[0])
    assert read["ok"] is (code == 0)
    assert {*read} - {"shoal", "verb", "ok"} in ({"result"}, {"errors"})
    return code, read, err


def test_every_verb_that_prints_a_result_takes_it() -> None:
    _, parsers = program.parsers()

    def takes_json(parser: argparse.ArgumentParser) -> bool:
        return "--json" in parser.format_help()

    assert {name for name, parser in parsers.items() if not takes_json(parser)} == WITHOUT_RESULT


@pytest.mark.parametrize("ranks", [(), ("-n", "2")], ids=["alone", "two ranks"])
def test_a_training_prints_nothing_else_on_stdout(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        "digits",
        "--out",
        tmp_path / "run",
        "--json",
    ]
    words = list(map(str, [*command, *ranks, *TINY]))
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)["result"]
    assert ended.stdout.count("\n") == 1
    assert (result["step"], result["validation"]["samples"]) == (3, 360)
    assert "final validation" in ended.stderr


def test_a_training_that_fails_says_why_on_stdout(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("models = {'net': lambda **options: 1 / 0}")
    command = [sys.executable, "-m", "shoal", "train", "digits", "--plugin", plugin, "--json"]
    words = map(str, [*command, "--model.name", "net", "--out", tmp_path / "run"])
    ended = subprocess.run(list(words), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "division by zero" in json.loads(ended.stdout)["errors"][0]
    assert "Traceback" in ended.stderr


def test_a_run_is_evaluated_exported_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert shoal(capsys, "train", "digits", "--out", run, *TINY)[0] == 0
    assert answer(capsys, "eval", run)[1]["result"]["samples"] == 360
    missing = answer(capsys, "eval", run, "-n", "2", "--checkpoint", "999")[1]["errors"]
    assert missing == ["step-00000999 is not there; there are: step-00000003"]
    model, picture = tmp_path / "model.safetensors", tmp_path / "curves.png"
    exported = answer(capsys, "export", run, "-o", model)[1]["result"]
    assert (exported["file"], exported["step"]) == (str(model), 3)
    assert answer(capsys, "plot", run, "-o", picture)[1]["result"] == {"file": str(picture)}


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("config digits", {"train.epochs"}),
        ("plan-tensor stdlib_gpt -t 2", {"tensor", "modules"}),
        ("schedule 1f1b -p 2 -m 2", {"name", "rows"}),
        ("plan digits -n 2 --servers", {"text"}),
    ],
)
def test_a_result_has_its_names(
    capsys: pytest.CaptureFixture[str], line: str, keys: set[str]
) -> None:
    code, read, _ = answer(capsys, *line.split())
    assert code == 0
    assert keys <= read["result"].keys()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("config digits --optimizer.lrr 1 --train.epochs x", ["did you mean", "train.epochs"]),
        ("train digits --train.epochs x", ["train.epochs"]),
        ("train digits --slurm --nodes 2", ["--json: a job is only submitted here"]),
        ("eval missing", ["missing is no run directory"]),
        ("eval", ["one run directory is needed"]),
        ("export missing", ["missing is no run directory"]),
        ("trace missing", ["missing"]),
        ("verify missing.py", ["there is no script missing.py"]),
        ("verify digits --tolerance x", ["argument --tolerance"]),
        ("schedule nosuch", ["nosuch"]),
        ("schedule 1f1b -m x", ["'x' is no whole number"]),
        ("plan digits -n 0", ["argument -n/--processes: 0 must be from 1 to 1024"]),
        ("scale missing 2", ["missing"]),
        ("servers missing", ["missing"]),
        ("replay missing", ["missing"]),
        ("doctor more", ["unrecognized arguments: more"]),
    ],
)
def test_an_error_is_an_object_too(
    capsys: pytest.CaptureFixture[str], line: str, said: list[str]
) -> None:
    code, read, err = answer(capsys, *line.split())
    assert code != 0
    assert err == ""
    assert len(read["errors"]) == len(said)
    for error, words in zip(read["errors"], said, strict=True):
        assert words in error


def test_a_word_of_a_script_is_no_option_of_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ("verify missing.py -- --json", "launch -n 2 missing.py --json"):
        code, out, err = shoal(capsys, *line.split())
        assert (code, out) == (2, "")
        assert "there is no script missing.py" in err
