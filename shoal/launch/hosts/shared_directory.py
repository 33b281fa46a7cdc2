"""A test whether hosts see one file system, by a file that one of them writes.

Device numbers and mount tables prove nothing: two machines may have the same ones, and one file
system may be mounted from two servers.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 2.0
"""Seconds for which a host looks for the file of another; network file systems may be late."""


def write_probe(directory: str, nonce: str) -> Path | None:
    """Write a file with the nonce where `directory` is, or would be made. The first host calls it.

    Returns:
        The file, which the caller must remove with `remove_probe`; None where nothing can be
        written there.
    """
    raise NotImplementedError


def sees_probe(probe: str, nonce: str, timeout_s: float = LOOK_S) -> bool:
    """Return True if the file that another host wrote is here as well. All other hosts call it."""
    raise NotImplementedError


def remove_probe(probe: Path) -> None:
    """Remove the file of `write_probe`. It may be gone already."""
    raise NotImplementedError
