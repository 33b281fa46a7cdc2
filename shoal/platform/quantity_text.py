"""Sizes and times as text."""

from __future__ import annotations


def bytes_text(size: float) -> str:
    """Return a size in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"
