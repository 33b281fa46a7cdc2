"""The file by which hosts find out whether they see one file system."""

import os
import stat
import threading
from pathlib import Path

import pytest

from shoal.launch.hosts import shared_directory
from shoal.launch.hosts.shared_directory import (
    existing_directory,
    remove_probe,
    sees_probe,
    write_probe,
)

NONCE = "5e2a9c"


def test_a_host_that_sees_the_file_shares_the_directory(tmp_path: Path):
    probe = write_probe(str(tmp_path / "runs" / "digits"), NONCE)
    assert probe is not None
    assert probe.parent == tmp_path, "nothing is made before the run starts"
    assert sees_probe(str(probe), NONCE, 0.0)
    assert not sees_probe(str(probe), "another", 0.0)
    remove_probe(probe)
    assert not sees_probe(str(probe), NONCE, 0.0)
    remove_probe(probe)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_comes_late_is_seen(tmp_path: Path):
    place = tmp_path / "late"
    late = threading.Timer(0.3, place.write_text, (NONCE,))
    late.start()
    assert sees_probe(str(place), NONCE, 30.0)
    late.join()


def test_no_file_is_written_where_another_one_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_directory.secrets, "token_hex", lambda size: "taken")
    (tmp_path / ".shoal-probe-taken").symlink_to(tmp_path / "target")
    assert write_probe(str(tmp_path), NONCE) is None
    assert not (tmp_path / "target").exists()


def test_another_user_can_neither_read_the_nonce_nor_take_it_from_the_name(tmp_path: Path):
    probe = write_probe(str(tmp_path), NONCE)
    assert probe is not None
    assert NONCE not in probe.name
    assert stat.S_IMODE(probe.stat().st_mode) == 0o600
    remove_probe(probe)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_that_cannot_be_written_has_no_file(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert write_probe(str(tmp_path), NONCE) is None


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert not sees_probe(str(tmp_path / "pipe"), NONCE, 0.0)
    assert existing_directory(str(tmp_path / "pipe" / "below")) == tmp_path
