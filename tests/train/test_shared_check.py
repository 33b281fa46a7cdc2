"""Ranks that find out before training whether they see one directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm.mesh import Mesh, init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.errors import ConfigError
from shoal.launch.environment import read as read_place
from shoal.testing import world
from shoal.train import shared_check
from shoal.train.shared_check import check_shared


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
    original = shared_check.sees_probe
    shared_check.sees_probe = lambda path, nonce: mesh.rank != 1 and original(path, nonce)
    with pytest.raises(ConfigError, match=r"--out .*: rank 1 does not see the directory of rank 0"):
        check_shared(mesh, str(folder / "run"), "--out")
    shared_check.write_probe = lambda directory, nonce: None
    with pytest.raises(ConfigError, match="rank 0 cannot write there"):
        check_shared(mesh, str(folder / "run"), "--out")


def test_ranks_that_do_not_see_the_directory_of_rank_0_are_named_on_every_rank(
    tmp_path: Path,
) -> None:
    world.run(3, looks, tmp_path)
