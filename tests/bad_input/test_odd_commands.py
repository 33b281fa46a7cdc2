"""Odd input is refused by the command itself: exit status 2, one message, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from odd_commands import Command, commands, name_of
from odd_files import make_files

from shoal import cli

LONGEST_S = 60  # a command that waits for ever, as for the writer of a named pipe, is ended
MESSAGE = re.compile(r"^shoal(?: [a-z-]+: error)?:(?: error:)? ", re.MULTILINE)
COMMANDS = list(dict.fromkeys(commands()))


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("odd")
    make_files(directory)
    return directory


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, odd_files: Path) -> Iterator[None]:
    """Fail where ranks or a training start, and where a file is left behind."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("ranks or a training were started")

    for place in (
        "shoal.launch.restarting.start",
        "shoal.train.entry.train",
        "shoal.train.entry.evaluate",
        "shoal.train.evaluation.verify_job",
    ):
        monkeypatch.setattr(place, start)
    monkeypatch.chdir(odd_files)
    before = files(odd_files)
    yield
    assert files(odd_files) == before


def files(directory: Path) -> set[str]:
    return {
        os.path.join(place, name)
        for place, names, others in os.walk(directory)
        for name in [*names, *others]
        if "__pycache__" not in place and name != "__pycache__"
    }


EVERY_DAY = 330
# A whole number of rows is left out between two of every day, so that each part of the table has
# its share.
ROWS = [
    pytest.param(
        command,
        id=name_of(command),
        marks=[] if number * EVERY_DAY % len(COMMANDS) < EVERY_DAY else [pytest.mark.slow],
    )
    for number, command in enumerate(COMMANDS)
]


@pytest.mark.limit(LONGEST_S)
@pytest.mark.parametrize("command", ROWS)
def test_an_odd_command_is_refused_in_one_message(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    assert len(MESSAGE.findall(err)) == 1, err
    assert "Traceback" not in err
    assert len(err) < 3000


def test_the_table_is_long_every_day() -> None:
    assert sum(not row.marks for row in ROWS) >= 300


AS_PROCESSES = [
    ("train", "digits", "-n", "2", "--seed", str(2**64)),
    ("train", "digits", "-n", "2", "--out", "/dev/null"),
    ("train", "digits", "-n", "2", "--name", "x" * 5000),
    ("train", "deep.yaml", "-n", "2"),
    ("train", "digits", "-n", "1" + "0" * 21),
    ("train", "digits", "-n", "2", "--strategy", "server=1000000"),
    ("train", "empty.yaml", "-n", "2"),
    ("train", "pipe.yaml", "-n", "2"),
    ("launch", "-n", "2", "missing.py"),
    ("export", "oddrun"),
]


@pytest.mark.slow
def test_as_processes_odd_commands_end_the_same_way(odd_files: Path) -> None:
    for command in AS_PROCESSES:
        words = [sys.executable, "-m", "shoal", *command]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
        assert len(MESSAGE.findall(ended.stderr)) == 1
        assert "Traceback" not in ended.stderr
