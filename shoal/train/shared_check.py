"""The check, before training, that the ranks of all hosts see one directory.

Rank 0 makes a small file, and the others look for it. Device numbers and mount tables prove
nothing: two machines may have the same ones, and one file system may be mounted from two servers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.platform.files import existing_directory

if TYPE_CHECKING:  # run directories are looked at without torch
    from shoal.comm.mesh import Mesh

LOOK_S = 2.0
"""Seconds for which a host looks for the file of another; network file systems may be late."""
PAUSE_S = 0.1
PROBE_PREFIX = ".shoal-probe-"
"""Beginning of the name of a file that is there for a moment."""


@contextmanager
def probe_in(directory: str) -> Iterator[str]:
    """Make a file where `directory` is, or would be made, and yield its path. Rank 0 calls it.

    Its name is random, and no other file has it. Yields "" where nothing can be written there.
    """
    path = existing_directory(directory) / f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        yield ""
        return
    try:
        os.close(descriptor)
        yield str(path)
    finally:
        with suppress(OSError):
            path.unlink()


def sees_probe(probe: str, timeout_s: float = LOOK_S) -> bool:
    """Return True if the file that another host has made is here as well. Other ranks call it."""
    end_s = time.monotonic() + timeout_s
    while not Path(probe).is_file():
        if time.monotonic() >= end_s:
            return False
        time.sleep(PAUSE_S)
    return True


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
    with probe_in(directory) if mesh.rank == 0 else nullcontext("") as probe:
        path = mesh.broadcast_str(probe)
        sees = bool(path) and (mesh.rank == 0 or sees_probe(path))
        seen = mesh.all_gather_str(str(sees))
    if not path:
        raise ConfigError([f"{setting} {directory}: rank 0 cannot write there. Choose another."])
    if blind := [str(rank) for rank, text in enumerate(seen) if text != "True"]:
        raise ConfigError(
            [
                f"{setting} {directory}: rank {', '.join(blind)} does not see the directory of "
                "rank 0. All hosts must share it: choose one on a file system that all mount."
            ]
        )
