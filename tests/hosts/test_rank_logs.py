"""Logs of ranks in a directory that other users can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.launch.hosts.line_printer import RankLogs


def test_only_the_user_can_read_a_log(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path / "new")
    logs.write(0, "one\n")
    logs.write(3, "two\n")
    logs.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert modes == {"rank-0.log": 0o600, "rank-3.log": 0o600}


def test_no_log_is_written_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "rank-1.log").symlink_to(victim)
    logs = RankLogs(tmp_path)
    logs.write(1, "not here\n")
    logs.close()
    assert victim.read_text() == "mine"
    assert "no more logs are written" in capsys.readouterr().err
    (tmp_path / "rank-0.log").unlink()
    (tmp_path / "rank-0.log").symlink_to(victim)
    with pytest.raises(UsageError, match="no log can be written there"):
        RankLogs(tmp_path)


@pytest.mark.parametrize("has_reader", [False, True])
def test_no_log_is_written_into_a_pipe_nor_waited_for(tmp_path: Path, has_reader: bool) -> None:
    os.mkfifo(tmp_path / "rank-0.log")
    reader = os.open(tmp_path / "rank-0.log", os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
    with pytest.raises(UsageError, match="no log can be written there"):
        RankLogs(tmp_path)
    if has_reader:
        os.close(reader)
