"""A directory in the memory of a host, in which snapshots outlive the ranks that wrote them.

    launcher or agent ── makes ──> /dev/shm/shoal-snapshots-N, and shares the lock on it
    its ranks         ── write ──> checkpoints/step-00000012, and share the lock
    keeper            ── waits until nobody shares the lock, and removes the directory

So nothing is left when a run ends in whatever way. Where the keeper is killed as well, the next run
of the same user on this host removes what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from shoal.errors import LaunchError

VARIABLE = "SHOAL_SNAPSHOTS"
"""The variable that names the directory to ranks."""
PLACE = Path("/dev/shm")
PREFIX = "shoal-snapshots-"
KEEPER = Path(__file__).with_name("snapshot_keeper.py")


class SnapshotMemory:
    """The directory of one launcher or agent. As a context, it is removed at the end.

    Attributes:
        path: the directory, which only this user can read.

    Raises:
        LaunchError: there is no such memory, or nothing can be written there.
    """

    def __init__(self) -> None:
        remove_abandoned()
        try:
            self.path, self._lock = _make_locked()
        except OSError as error:
            raise LaunchError(
                f"snapshot.every: snapshots lie in {PLACE}, the memory of a Linux system, and it "
                f"cannot be written here: {error.strerror}. Use --snapshot.every none."
            ) from error
        # In a session of its own: it must survive the signal that ends all others.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(self.path)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> SnapshotMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory, after the ranks have ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._keeper.kill()
        self._keeper.wait()
        os.close(self._lock)


def share_lock(directory: Path) -> int:
    """Share the lock on the directory of a launcher. Return its descriptor, to be kept open.

    Raises:
        OSError: it is not there any more.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_abandoned() -> None:
    """Remove directories of this user whose launcher, ranks and keeper have all been killed."""
    for path in PLACE.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make_locked() -> tuple[Path, int]:
    """Make a directory with a new name, and return it with the descriptor that has its lock."""
    while True:
        # Hosts whose ranks compare these names have different ones.
        path = PLACE / f"{PREFIX}{secrets.token_hex(16)}"
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = share_lock(path)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # another run took it for an abandoned one before it had a lock
