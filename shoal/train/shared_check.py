"""The check, before training, that the ranks of all hosts see one directory.

Rank 0 writes a small file, and the others look for it. Device numbers and mount tables prove
nothing: two machines may have the same ones, and one file system may be mounted from two servers.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.platform.files import existing_directory
from shoal.platform.ownership import read_text_of_file

if TYPE_CHECKING:  # run directories are looked at without torch
    from shoal.comm.mesh import Mesh

NONCE_BYTES = 16
LOOK_S = 2.0
"""Seconds for which a host looks for the file of another; network file systems may be late."""
PAUSE_S = 0.1
NAME_BYTES = 8

PROBE_PREFIX = ".shoal-probe-"
"""Beginning of the name of a file that is there for a moment."""


def write_probe(directory: str, nonce: str) -> Path | None:
    """Write a file with the nonce where `directory` is, or would be made. Rank 0 calls it.

    Its name does not tell the nonce, which nobody else can read: a user who sees the name here
    could otherwise make the same file on another host.

    Args:
        nonce: letters and digits that no other run has.

    Returns:
        The file, which the caller must remove with `remove_probe`; None where nothing can be
        written there.
    """
    probe = existing_directory(directory) / f"{PROBE_PREFIX}{secrets.token_hex(NAME_BYTES)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(probe, flags, 0o600), "w") as file:
            file.write(nonce)
            file.flush()
            os.fsync(file.fileno())  # a client of NFS keeps it to itself before
    except OSError:
        with suppress(OSError):  # the disk may be full, and the file be there
            probe.unlink()
        return None
    return probe


def sees_probe(probe: str, nonce: str, timeout_s: float = LOOK_S) -> bool:
    """Return True if the file that another host wrote is here as well. All other ranks call it."""
    end_s = time.monotonic() + timeout_s
    while True:
        with suppress(OSError, UnicodeDecodeError):
            if read_text_of_file(Path(probe), len(nonce)) == nonce:
                return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(PAUSE_S)


def remove_probe(probe: Path) -> None:
    """Remove the file of `write_probe`. It may be gone already."""
    with suppress(OSError):
        probe.unlink()


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
