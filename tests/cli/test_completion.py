"""`shoal completion`: the scripts complete in real shells."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_calls import shoal

TYPED = [
    ("tr", ["train", "trace"]),
    ("train --optimizer.l", ["--optimizer.lr"]),
    ("launch --show-output al", ["all"]),
    ("verify --strategy zero", ["zero1", "zero2", "zero3"]),
    ("servers rem", ["remove"]),
    ("launch --nproc", []),
]
BASH = """\
source "$1"
COMP_WORDS=(shoal $2)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shoal
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(capsys: pytest.CaptureFixture[str], folder: Path, shell: str) -> str:
    code, out, err = shoal(capsys, "completion", shell)
    assert (code, err) == (0, "")
    path = folder / f"shoal.{shell}"
    path.write_text(out)
    return str(path)


def said(*words: str) -> list[str]:
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(("typed", "expected"), TYPED)
def test_bash_completes_verbs_options_settings_and_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, typed: str, expected: list[str]
) -> None:
    path = script(capsys, tmp_path, "bash")
    assert said("bash", "--norc", "-c", BASH, "bash", path, typed) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_them_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = script(capsys, tmp_path, "fish")
    for typed, expected in TYPED:
        command = f"source {shlex.quote(path)}; complete -C 'shoal {typed}'"
        found = said("fish", "--no-config", "-c", command)
        assert {*expected} <= {*found}, typed


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = script(capsys, tmp_path, "zsh")
    dump = f"compinit() {{ }}; source {shlex.quote(path)}; "
    dump += "print ${_comps[shoal]} ${+functions[_shoal]}"
    found = said("zsh", "-f", "-c", f"autoload -Uz compinit; compinit -D -u; {dump}")
    assert found[-1] == "1"
    assert "_bash_complete" in found


@pytest.mark.parametrize("words", [(), ("tcsh",), ("bash", "zsh")])
def test_other_shells_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = shoal(capsys, "completion", *words)
    assert (code, out) == (2, "")
    assert "shoal completion: error" in err or "unrecognized arguments: zsh" in err
