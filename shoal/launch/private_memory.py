"""Memory without a name that only processes of the same user can open, by way of /proc.

    launcher   memfd, open as descriptor 7     SHOAL_STORE=/proc/LAUNCHER/fd/7
    ranks      torch.distributed.FileStore(SHOAL_STORE)

torch's TCPStore takes keys and values from whoever connects, and Gloo's addresses, NCCL's ids and
the descriptions of shared memory stand in it. This memory has no name in any directory, so there is
nothing to remove after a crash, and no port. The kernel lets only the same user (and root) open it.

The secret of a job on several hosts lies in such memory too. No argument, file or environment
variable has the secret itself.

    driver ── standard input of ssh ──> agent ── its memory ──> ranks of its host
"""

from __future__ import annotations

import os
from pathlib import Path

STORE = "SHOAL_STORE"
SECRET = "SHOAL_JOB_SECRET"


class PrivateMemory:
    """Memory of this process, until it ends or closes it.

    Args:
        variable: the environment variable by which ranks find it.
        name: of the memory, for lists of open files.
        content: in the beginning.

    Attributes:
        variables: the variable with its value.
    """

    def __init__(self, variable: str, name: str, content: bytes = b"") -> None:
        self._descriptor = os.memfd_create(name)
        os.fchmod(self._descriptor, 0o600)
        os.write(self._descriptor, content)
        self.variables = {variable: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        """Close it. Processes that have not opened it yet cannot any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_secret() -> bytes | None:
    """Return the secret of the job that this rank belongs to; None if it has none."""
    place = os.environ.get(SECRET)
    return None if place is None else Path(place).read_bytes()
