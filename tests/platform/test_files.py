"""Files that are replaced as a whole, whoever is killed and whatever lies in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.platform.files import Durability, atomic_write, make_private_directory

KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from pathlib import Path
from shoal.platform.files import atomic_write

with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITES_OFTEN = """
import sys
from pathlib import Path
from shoal.platform.files import atomic_write

for _ in range(200):
    with atomic_write(Path(sys.argv[1]), many_writers=True) as file:
        file.write(sys.argv[2].encode() * 100_000)
"""


def test_the_new_content_replaces_the_old_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("a longer text than the new one")
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_content_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"


@pytest.mark.parametrize("many_writers", [False, True])
def test_an_exception_leaves_the_old_content_and_nothing_beside_it(
    tmp_path: Path, many_writers: bool
) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(path, many_writers=many_writers) as file:
        file.write({}["half"])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_content_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_THE_MIDDLE, str(path)], check=False)
    assert killed.returncode == -9
    assert path.read_text() == "old"
    assert (tmp_path / "notes.tmp").read_text() == "half"
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_writers_at_once_one_wins_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    command = [sys.executable, "-c", WRITES_OFTEN, str(path)]
    writers = [subprocess.Popen([*command, letter]) for letter in "ab"]
    try:
        assert [writer.wait() for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert path.read_text() in ("a" * 100_000, "b" * 100_000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    somebodys = tmp_path / "somebody's"
    somebodys.write_text("theirs")
    (tmp_path / "notes.tmp").symlink_to(somebodys)
    with atomic_write(tmp_path / "notes") as file:
        file.write(b"new")
    assert somebodys.read_text() == "theirs"
    assert not (tmp_path / "notes").is_symlink()


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    somebodys = tmp_path / "somebody's"
    somebodys.write_text("theirs")
    (tmp_path / "notes").symlink_to(somebodys)
    with atomic_write(tmp_path / "notes") as file:
        file.write(b"new")
    assert somebodys.read_text() == "theirs"
    assert not (tmp_path / "notes").is_symlink()


@pytest.mark.parametrize(("mode", "expected"), [(0o666, 0o640), (0o644, 0o640), (0o600, 0o600)])
def test_the_file_has_the_permissions_that_were_asked_for_less_the_umask(
    tmp_path: Path, mode: int, expected: int
) -> None:
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "notes", mode=mode) as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "notes").stat().st_mode) == expected


@pytest.mark.parametrize(
    ("survives", "expected"),
    [
        ("process", ["rename"]),
        ("file", ["fsync of 3 bytes", "rename"]),
        ("rename", ["fsync of 3 bytes", "rename", "fsync of the directory"]),
    ],
)
def test_the_disk_is_waited_for_before_and_after_the_rename_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: Durability, expected: list[str]
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        what = "the directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes"
        happened.append(f"fsync of {what}")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        happened.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with atomic_write(tmp_path / "notes", survives=survives) as file:
        file.write(b"new")
    assert happened == expected


def test_a_directory_in_the_place_of_the_partial_file_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").mkdir()
    with pytest.raises(OSError, match=r"notes\.tmp"), atomic_write(tmp_path / "notes"):
        pass
    assert (tmp_path / "notes.tmp").is_dir()


def test_a_directory_of_ones_own_is_made_elsewhere_if_its_place_is_gone(tmp_path: Path) -> None:
    first = make_private_directory("shoal-test-", str(tmp_path))
    assert first.parent == tmp_path
    assert first.stat().st_mode & 0o777 == 0o700
    second = make_private_directory("shoal-test-", str(tmp_path / "gone"))
    try:
        assert second.is_dir()
    finally:
        second.rmdir()
