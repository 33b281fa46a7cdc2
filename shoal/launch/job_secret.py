"""A secret of a job on several hosts, in memory that only processes of the same user can open.

driver ── standard input of ssh ──> agent ── memory without a name ──> ranks of its host

No argument, file or environment variable has the secret itself. A variable tells ranks where the
agent holds the memory, as for the rendezvous of one host (`private_store.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SHOAL_JOB_SECRET"
SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return 256 random bits."""
    return secrets.token_bytes(SECRET_BYTES)


def hold_secret(secret: bytes) -> Mapping[str, str]:
    """Hold the secret in memory of this process, until it ends.

    Returns: the environment variable of its ranks; empty where the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        return {}
    descriptor = os.memfd_create("shoal-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret)
    return {VARIABLE: f"/proc/{os.getpid()}/fd/{descriptor}"}


def read_secret() -> bytes | None:
    """Return the secret of the job that this rank belongs to; None if it has none."""
    place = os.environ.get(VARIABLE)
    return None if place is None else Path(place).read_bytes()
