"""Everything that can be wrong with what lies on the disk, by accident or by another user."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from test_checkpoint_store import data_file, filled, flip_a_bit, saved, truncate

from shoal.checkpoint import newest
from shoal.errors import CheckpointError


def manifest_of_another_format(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 2'))


def altered_info(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))


def a_path_out_of_the_directory(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace("rank-00000.safetensors", "../../secret"))


def another_directory_name(path: Path) -> None:
    shutil.rmtree(path.parent)
    shutil.copytree(path.parent.with_name("step-00000001"), path.parent)


def a_symbolic_link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def a_linked_directory(path: Path) -> None:
    path.parent.rename(path.parents[2] / "elsewhere")
    path.parent.symlink_to(path.parents[2] / "elsewhere")


DAMAGES = {
    "should have .* bytes and has 100": truncate,
    "rank-00000.safetensors was altered: digest": flip_a_bit,
    "index.json was altered: digest": lambda path: flip_a_bit(path.with_name("index.json")),
    "rank-00000.safetensors is missing": Path.unlink,
    "index.json is missing": lambda path: path.with_name("index.json").unlink(),
    "rank-00007.safetensors is not in the manifest": lambda path: path.with_name(
        "rank-00007.safetensors"
    ).write_bytes(b"x"),
    "manifest.json is missing": lambda path: path.with_name("manifest.json").unlink(),
    "manifest.json is unreadable": lambda path: truncate(path.with_name("manifest.json")),
    "manifest.json is no manifest": lambda path: path.with_name("manifest.json").write_text("[]"),
    "has format 2; this version of Shoal reads format 3": manifest_of_another_format,
    "manifest.json was altered": altered_info,
    "was altered: its SHA-256": a_path_out_of_the_directory,
    "is of step 1, which is not what its directory is called": another_directory_name,
    "rank-00000.safetensors is a symbolic link": a_symbolic_link,
    "step-00000002 is a symbolic link": a_linked_directory,
    "rank-00000.safetensors can be written by other users": lambda path: path.chmod(0o664),
    "step-00000002 can be written by other users": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.parametrize("complaint", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, complaint: str
) -> None:
    store = saved(tmp_path / "c", 1, 2)
    DAMAGES[complaint](data_file(tmp_path / "c", 2))
    reports: list[str] = []
    loaded = store.load(reports.append)
    assert loaded is not None
    assert loaded.step == 1
    assert torch.equal(loaded.tensors["weight"], filled(1)["weight"])
    assert len(reports) == 1
    with pytest.raises(CheckpointError, match=complaint):
        raise CheckpointError(reports[0])
    assert reports[0].startswith("checkpoint step-00000002 is skipped: ")
    with pytest.raises(CheckpointError, match=complaint):
        store.load(pytest.fail, 2)


def test_a_missing_or_emptied_hint_changes_nothing_but_is_reported(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1, 2)
    latest = tmp_path / "c" / "latest"
    assert latest.read_text() == "step-00000002\n"
    for text, complaint in (
        ("", "names no checkpoint"),
        ("step-00000009", "names step-00000009, which is not there"),
    ):
        latest.write_text(text)
        reports: list[str] = []
        loaded = store.load(reports.append)
        assert loaded is not None
        assert loaded.step == 2
        assert reports == [f"{latest} {complaint}"]
    latest.unlink()
    assert store.load(pytest.fail) is not None


def test_when_all_are_damaged_training_does_not_start_afresh_silently(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1, 2)
    truncate(data_file(tmp_path / "c", 1))
    flip_a_bit(data_file(tmp_path / "c", 2))
    for search in (lambda: store.load(pytest.fail), lambda: newest(tmp_path / "c")):
        with pytest.raises(
            CheckpointError,
            match=r"(?s)step-00000002.*altered.*step-00000001.*has 100.*move them away",
        ):
            search()


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1)
    (tmp_path / "c").chmod(0o775)
    for use in (lambda: store.load(pytest.fail), lambda: store.save(2, filled(2), {})):
        with pytest.raises(
            CheckpointError, match=r"written by other users .mode 775.*chmod -R go-w"
        ):
            use()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1)
    os.chown(tmp_path / "c", 12345, -1)
    with pytest.raises(
        CheckpointError, match=r"belongs to user 12345, and you are user 0.*copy of your own"
    ):
        store.load(pytest.fail)


def test_a_generous_umask_does_not_make_checkpoints_that_are_refused(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = saved(tmp_path / "c", 1)
    finally:
        os.umask(before)
    assert store.load(pytest.fail) is not None
