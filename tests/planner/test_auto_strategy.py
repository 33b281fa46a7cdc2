"""`--strategy auto`: the choice is told with its reason, and a run that goes on keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli import program
from shoal.config import read, to_yaml
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.planner.auto_strategy import choose
from shoal.strategies import parse_line
from shoal.train.run_directory import CONFIG


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = [("model.options", "{widths: [8, 16]}"), ("out", str(tmp_path / "run"))]
    return read("digits", [*flags, ("strategy", "auto")]).job


def test_the_choice_is_a_line_with_its_reason(job: Job) -> None:
    line, reason = choose(job, 2)
    parse_line(line)
    assert reason.startswith(f"strategy auto: {line}: ")
    assert "a step predicted" in reason
    assert choose(job, 2) == (line, reason)


def test_a_run_that_goes_on_keeps_its_strategy(job: Job) -> None:
    directory = Path(job.directory)
    directory.mkdir()
    (directory / CONFIG).write_text(to_yaml(replace(job, strategy="zero3")))
    line, reason = choose(job, 2)
    assert line == "zero3"
    assert "as the run in" in reason


def test_auto_beside_other_strategies_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto stands alone"):
        parse_line("auto,zero1")


def test_ranks_of_another_launcher_do_not_choose_each_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(SystemExit) as ended:
        program.main(["train", "digits", "--strategy", "auto"])
    assert ended.value.code == 2
    assert "every rank would choose by itself" in capsys.readouterr().err
