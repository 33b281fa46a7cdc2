"""Ranks that find out who shares a disk, and the copies of metrics on other hosts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm.mesh import Mesh, init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.config import read
from shoal.errors import ConfigError
from shoal.launch.environment import read as read_place
from shoal.testing import world
from shoal.train import run_disks
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.metrics_copies import MetricsCopies
from shoal.train.run_disks import describe_disks, find_disks


def mesh_of_hosts() -> Mesh:
    """Return the mesh of ranks that each seem to be on a host of their own."""
    place = replace(read_place(os.environ), local_rank=0, local_world=1)
    return init_mesh(place, helpers=False, degrees=ParallelDims())


def finds_disks(folder: Path) -> None:
    mesh = mesh_of_hosts()
    job = read(None, [("out", str(folder / "run"))]).job
    assert find_disks(job, mesh, has_servers=True) is None, "all see the files of all"
    own = f"/.shoal-probe-host{mesh.rank // 2}"

    def sees(path: str, nonce: str, timeout_s: float = 0.0) -> bool:
        return path.endswith(own)

    def write(directory: str, nonce: str) -> Path | None:
        return Path(f"{own}") if mesh.rank % 2 == 0 else None

    run_disks.sees_probe, run_disks.write_probe = sees, write
    disks = find_disks(job, mesh, has_servers=False)
    assert disks == HostDisks((0, 0, 1), 1)
    with pytest.raises(ConfigError, match="strategy server needs a run directory"):
        find_disks(job, mesh, has_servers=True)


def copies_metrics(folder: Path) -> None:
    """Three hosts; the first keeps metrics, the second its copy."""
    mesh = mesh_of_hosts()
    directory = folder / f"host{mesh.rank}"
    directory.mkdir(parents=True)
    metrics = directory / "metrics.jsonl"
    disks = HostDisks((0, 1, 2))
    lines = [f'{{"kind": "train", "step": {step}, "loss": 0.5}}\n' for step in (1, 2, 3)]
    copies = MetricsCopies(directory, mesh, disks)
    for number in (1, 2):
        if mesh.rank == 0:
            metrics.write_text("".join(lines[:number]))
        copies.update()
    expected = "".join(lines[:2])
    assert not metrics.exists() if mesh.rank == 2 else metrics.read_text() == expected
    mesh.barrier()
    if mesh.rank == 0:
        metrics.write_text(lines[0])  # as on another host that was the first one before
    MetricsCopies(directory, mesh, disks).restore(resume_step=2)
    assert mesh.rank == 2 or metrics.read_text() == expected
    MetricsCopies(directory, mesh, None).update()


def _both(folder: Path) -> None:
    copies_metrics(folder)
    finds_disks(folder)


def test_ranks_find_their_disks_and_metrics_are_copied(tmp_path: Path) -> None:
    world.run(3, _both, tmp_path)


def test_the_header_says_what_each_host_keeps():
    (line,) = describe_disks(HostDisks((0, 0, 1)))
    assert line.startswith(
        "checkpoints on 2 disks: each host keeps the files of its ranks and copies of those of 1 "
        "other host;"
    )
    (line,) = describe_disks(HostDisks((0, 1), copies=0))
    assert "and no copy, so that a lost host's part is lost" in line
    assert describe_disks(None) == []
