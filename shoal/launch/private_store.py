"""The rendezvous of ranks of one machine: memory that only processes of the same user can open.

    launcher   memfd, open as descriptor 7     SHOAL_STORE=/proc/LAUNCHER/fd/7
    ranks      torch.distributed.FileStore(SHOAL_STORE)

torch's TCPStore takes keys and values from whoever connects, and Gloo's addresses, NCCL's ids and
the descriptions of shared memory stand in it. This memory has no name in any directory, so there is
nothing to remove after a crash, and no port. The kernel lets only the same user (and root) open it
by way of /proc.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "SHOAL_STORE"


class PrivateStore:
    """The memory of one world's rendezvous, in the launcher. Systems without memfd have none.

    Attributes:
        variables: the environment variable by which ranks find it; empty where there is none.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self.variables: Mapping[str, str] = {}
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("shoal-store")
            self.variables = {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        """Close it. Ranks that have not joined yet cannot any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
