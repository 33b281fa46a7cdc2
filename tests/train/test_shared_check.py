"""Ranks that find out before training whether they see one directory."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm.mesh import Mesh, init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.errors import ConfigError
from shoal.launch.environment import read as read_place
from shoal.platform.files import existing_directory
from shoal.testing import world
from shoal.train import run_directory
from shoal.train.run_directory import check_shared, probe_in, sees_probe


def mesh_of_hosts() -> Mesh:
    """Return the mesh of ranks that each seem to be on a host of their own."""
    place = replace(read_place(os.environ), local_rank=0, local_world=1)
    return init_mesh(place, helpers=False, degrees=ParallelDims())


def looks(folder: Path) -> None:
    mesh = mesh_of_hosts()
    check_shared(mesh, str(folder / "run"), "--out")
    mesh.barrier()
    assert list(folder.iterdir()) == [], "the file is gone, and no directory was made"
    mesh.barrier()
    original = run_directory.sees_probe
    run_directory.sees_probe = lambda path: mesh.rank != 1 and original(path)
    with pytest.raises(ConfigError, match=r"--out .*: rank 1 does not see the directory of rank 0"):
        check_shared(mesh, str(folder / "run"), "--out")
    run_directory.probe_in = lambda directory: nullcontext("")
    with pytest.raises(ConfigError, match="rank 0 cannot write there"):
        check_shared(mesh, str(folder / "run"), "--out")


def test_ranks_that_do_not_see_the_directory_of_rank_0_are_named_on_every_rank(
    tmp_path: Path,
) -> None:
    world.run(3, looks, tmp_path)


def test_a_host_that_sees_the_file_shares_the_directory(tmp_path: Path) -> None:
    with probe_in(str(tmp_path / "runs" / "digits")) as probe:
        assert Path(probe).parent == tmp_path, "nothing is made before the run starts"
        assert stat.S_IMODE(os.stat(probe).st_mode) == 0o600
        assert sees_probe(probe, 0.0)
    assert not sees_probe(probe, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_comes_late_is_seen(tmp_path: Path) -> None:
    place = tmp_path / "late"
    late = threading.Timer(0.3, place.touch)
    late.start()
    assert sees_probe(str(place), 30.0)
    late.join()


def test_no_file_is_written_where_another_one_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda size: "taken")
    (tmp_path / ".shoal-probe-taken").symlink_to(tmp_path / "target")
    with probe_in(str(tmp_path)) as probe:
        assert probe == ""
    assert not (tmp_path / "target").exists()
    assert (tmp_path / ".shoal-probe-taken").is_symlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_that_cannot_be_written_has_no_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with probe_in(str(tmp_path)) as probe:
        assert probe == ""


def test_a_pipe_in_the_place_of_the_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not sees_probe(str(tmp_path / "pipe"), 0.0)
    assert existing_directory(str(tmp_path / "pipe" / "below")) == tmp_path
