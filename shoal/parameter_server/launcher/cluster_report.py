"""What the servers of a run have seen, in words, for its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.platform.tensors import MIB


def report(figures: Iterable[Mapping[str, Any]], together: bool) -> list[str]:
    """Lines for a user.

    Args:
        figures: what each shard tells of itself; a relay tells what those behind it do.
        together: all workers took each step together.
    """
    figures = [behind for figure in figures for behind in figure.get("behind", [figure])]
    received, sent = (
        sum(figure[key] for figure in figures) / MIB for key in ("received_bytes", "sent_bytes")
    )
    lines = [
        f"servers: {len(figures)} shards received {received:,.1f} MiB and sent {sent:,.1f} MiB"
    ]
    refused = sum(figure["refused"] for figure in figures)
    if refused:
        lines.append(f"servers refused {refused} connections or messages: their warnings say why")
    seen: Counter[int] = Counter()
    for figure in figures:
        seen.update({int(gap): count for gap, count in figure["staleness"].items()})
    if not together:
        shares = (f"{gap}: {100 * seen[gap] / seen.total():.1f} %" for gap in sorted(seen))
        lines.append(
            f"steps that a worker was ahead of the slowest when it read: {', '.join(shares)}"
        )
    return lines
