"""The versions of torch that Shoal was tested with. Newer ones are used, with a note."""

from __future__ import annotations

OLDEST, NEWEST = (2, 11), (2, 15)
"""Minor versions, both included."""
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def minor_version(version: str) -> tuple[int, int]:
    """Return (2, 13) of 2.13.0+cpu."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def untested(version: str) -> str:
    """Return a sentence about a torch that was never tested; empty for one that was."""
    if OLDEST <= minor_version(version) <= NEWEST:
        return ""
    return f"torch {version} was never tested with this Shoal; {TESTED} are"
