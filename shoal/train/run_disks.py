"""The disks on which the run directories of all ranks are, found by a file of each host.

Each host writes a small file where its run directory is, or would be made. Ranks that see the file
of one host share its disk.
"""

from __future__ import annotations

import json
import secrets
import time

from shoal.comm.mesh import Mesh
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.launch.hosts.shared_directory import (
    LOOK_S,
    SERVERS_NEED_ONE,
    remove_probe,
    sees_probe,
    write_probe,
)
from shoal.train.checkpoint.host_disks import HostDisks, numbered

NONCE_BYTES = 16


def find_disks(job: Job, mesh: Mesh, has_servers: bool) -> HostDisks | None:
    """Return the disks of the run directories; None if all ranks share one. Collective.

    In a world of one host nothing is written or sent. Where hosts share no disk this takes `LOOK_S`
    seconds, because a network file system may show a file late.

    Args:
        job: its run directory has the same name on every host. It need not exist.
        has_servers: the optimizer runs on parameter servers, which need one shared disk.

    Raises:
        ConfigError: on every rank; hosts share no disk, and must.
    """
    place = mesh.place
    if place.local_world == place.world:
        return None
    probe, nonce = None, secrets.token_hex(NONCE_BYTES)
    if place.local_rank == 0:
        probe = write_probe(job.directory, nonce)
    try:
        answers = mesh.all_gather_str(json.dumps(None if probe is None else [str(probe), nonce]))
        probes = {
            writer: found for writer, text in enumerate(answers) if (found := json.loads(text))
        }
        key = _first_seen(probes, mesh.rank)
        keys = [int(text) for text in mesh.all_gather_str(str(key))]
    finally:
        if probe is not None:
            remove_probe(probe)
    disks = HostDisks(numbered(keys), job.checkpoint.copies)
    if disks.count == 1:
        return None
    if has_servers:
        raise ConfigError([f"{SERVERS_NEED_ONE}. Choose --out on a disk that all hosts share."])
    return disks


def check_shared(mesh: Mesh, directory: str, setting: str) -> None:
    """Check that all ranks see the directory that rank 0 sees. Collective.

    In a world of one host nothing is written or sent.

    Args:
        directory: exists, or would be made, on rank 0's host.
        setting: the setting or flag that chooses it, for the error.

    Raises:
        ConfigError: on every rank; it names the ranks that do not see it.
    """
    if mesh.place.local_world == mesh.place.world:
        return
    probe, nonce = None, secrets.token_hex(NONCE_BYTES) if mesh.rank == 0 else ""
    if mesh.rank == 0:
        probe = write_probe(directory, nonce)
    try:
        path, nonce = json.loads(mesh.broadcast_str(json.dumps([str(probe or ""), nonce])))
        sees = bool(path) and (mesh.rank == 0 or sees_probe(path, nonce))
        blind = [str(r) for r, text in enumerate(mesh.all_gather_str(str(sees))) if text != "True"]
    finally:
        if probe is not None:
            remove_probe(probe)
    if not path:
        raise ConfigError([f"{setting} {directory}: rank 0 cannot write there. Choose another."])
    if blind:
        raise ConfigError(
            [
                f"{setting} {directory}: ranks {', '.join(blind)} do not see the directory of rank "
                "0. All hosts must share it: choose one on a file system that all of them mount."
            ]
        )


def describe_disks(disks: HostDisks | None) -> list[str]:
    """Return the line about the disks for the header of a run; none if all ranks share one."""
    if disks is None:
        return []
    copies = min(disks.copies, disks.count - 1)
    if copies == 0:
        also = "and no copy, so that a lost host's part is lost"
    else:
        also = f"and copies of those of {copies} other host{'' if copies == 1 else 's'}"
    return [
        f"checkpoints on {disks.count} disks: each host keeps the files of its ranks {also}; "
        "the first host keeps the metrics, and whole checkpoints from the end of the run on"
    ]


def _first_seen(probes: dict[int, list[str]], rank: int) -> int:
    """Return the first rank whose file is seen here; this rank if there is none."""
    end_s = time.monotonic() + LOOK_S
    for writer, (path, nonce) in sorted(probes.items()):
        if writer == rank or sees_probe(path, nonce, max(0.0, end_s - time.monotonic())):
            return writer
    return rank
