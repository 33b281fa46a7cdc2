from __future__ import annotations

import os
import stat

import pytest

from shoal.errors import ConfigError
from shoal.parameter_server.transport.key import derived_key, new_key_file, read_key


def test_a_new_key_is_256_random_bits_that_only_its_owner_can_read(tmp_path):
    (tmp_path / "other").mkdir()
    before = os.umask(0)
    try:
        path, other = new_key_file(tmp_path), new_key_file(tmp_path / "other")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_key(path).secret) == 32
    assert read_key(path) != read_key(other)


def test_each_job_of_a_launch_has_a_key_of_its_own(tmp_path):
    key = derived_key(b"s" * 32, "first")
    assert key == derived_key(b"s" * 32, "first")
    assert key not in (derived_key(b"s" * 32, "second"), derived_key(b"t" * 32, "first"))
    assert read_key(new_key_file(tmp_path, key)) == key


def test_a_key_is_never_overwritten_and_a_symlink_is_not_followed(tmp_path):
    path = new_key_file(tmp_path)
    key = read_key(path)
    with pytest.raises(FileExistsError):
        new_key_file(tmp_path)
    assert read_key(path) == key
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        new_key_file(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_open_is_refused(tmp_path, mode):
    path = new_key_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*delete it"):
        read_key(path)


def test_a_key_that_belongs_to_another_user_is_refused(tmp_path, monkeypatch):
    path = new_key_file(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        read_key(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_length_is_refused_and_not_shown(tmp_path, size):
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"s" * size)
    with pytest.raises(ConfigError, match="does not hold the 32 bytes") as caught:
        read_key(path)
    assert "sss" not in str(caught.value)


def test_a_named_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in {
        "pipe": "is no regular file",
        ".": "is no regular file",
        "missing": "No such file",
    }.items():
        with pytest.raises(ConfigError, match=why):
            read_key(tmp_path / name)
