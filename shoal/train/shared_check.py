"""The check, before training, that the ranks of all hosts see one directory."""

from __future__ import annotations

import json
import secrets

from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.launch.hosts.shared_directory import remove_probe, sees_probe, write_probe

NONCE_BYTES = 16


def check_shared(mesh: Mesh, directory: str, setting: str) -> None:
    """Check that all ranks see the directory that rank 0 sees, by a small file. Collective.

    In a world of one host nothing is written or sent.

    Args:
        directory: it has the same name on every host, and need not exist.
        setting: the setting or flag that chooses it, for the error.

    Raises:
        ConfigError: on every rank; rank 0 cannot write there, or ranks do not see what it writes.
    """
    if mesh.place.local_world == mesh.place.world:
        return
    nonce = secrets.token_hex(NONCE_BYTES)
    probe = write_probe(directory, nonce) if mesh.rank == 0 else None
    try:
        path, nonce = json.loads(mesh.broadcast_str(json.dumps([str(probe or ""), nonce])))
        sees = bool(path) and (mesh.rank == 0 or sees_probe(path, nonce))
        seen = mesh.all_gather_str(str(sees))
    finally:
        if probe is not None:
            remove_probe(probe)
    if not path:
        raise ConfigError([f"{setting} {directory}: rank 0 cannot write there. Choose another."])
    if blind := [str(rank) for rank, text in enumerate(seen) if text != "True"]:
        raise ConfigError(
            [
                f"{setting} {directory}: rank {', '.join(blind)} does not see the directory of "
                "rank 0. All hosts must share it: choose one on a file system that all mount."
            ]
        )
