"""Report on the servers of a run, for its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.platform.tensors import MIB


def report(figures: Iterable[Mapping[str, Any]], together: bool) -> list[str]:
    """Return the lines of the report.

    Args:
        figures: of each shard; an aggregator's have those of the shards behind it.
        together: all workers took each step together, so there is no staleness to report.
    """
    shards = [shard for figure in figures for shard in figure.get("behind", [figure])]
    received_mib = sum(shard["received_bytes"] for shard in shards) / MIB
    sent_mib = sum(shard["sent_bytes"] for shard in shards) / MIB
    lines = [
        f"servers: {len(shards)} shards received {received_mib:,.1f} MiB and sent "
        f"{sent_mib:,.1f} MiB"
    ]
    refused = sum(shard["refused"] for shard in shards)
    if refused:
        lines.append(f"servers refused {refused} connections or messages: their warnings say why")
    reads: Counter[int] = Counter()  # staleness -> number of reads
    for shard in shards:
        reads.update({int(staleness): count for staleness, count in shard["staleness"].items()})
    if not together:
        shares = (
            f"{staleness}: {100 * reads[staleness] / reads.total():.1f} %"
            for staleness in sorted(reads)
        )
        lines.append(
            f"steps that a worker was ahead of the slowest when it read: {', '.join(shares)}"
        )
    return lines
