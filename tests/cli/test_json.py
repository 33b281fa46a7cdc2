"""`--json` of every verb prints one object of the same form, for errors too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import TINY, shoal

import shoal as package
from shoal.cli import program

WITHOUT_RESULT = {"train", "launch", "agent", "completion"}


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
