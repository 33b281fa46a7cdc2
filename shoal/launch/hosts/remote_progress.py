"""The progress of ranks on several hosts: a look of each agent, as it is sent to the driver.

No clock of a host is read by another. An agent counts the silence of its ranks, and says it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.launch.rank_set import Look
from shoal.launch.ranks import Ranks
from shoal.watchdog.progress_word import PAGE_BYTES, RankProgress, decode_page
from shoal.watchdog.progress_writer import now_ns


def sent_look(ranks: Ranks) -> list[tuple[int, float, str]]:
    """Look at the ranks of this host. Return number, silence and page of each."""
    # Pages come first: a rank that goes on before the look is not silent in it.
    pages = {rank.number: ranks.progress.page(rank.number) for rank in ranks.alive}
    return [
        (rank, silent_s, base64.b64encode(zlib.compress(pages[rank], 1)).decode())
        for rank, silent_s in ranks.look().silent_s.items()
    ]


def received_look(sent: Sequence[Any], ranks: range) -> Look:
    """Return the look of an agent, with times of this process.

    Args: ranks: those of its host.

    Raises:
        ValueError: no agent sends this.
    """
    progress: dict[int, RankProgress] = {}
    silent_s: dict[int, float] = {}
    try:
        for rank, silence_s, text in sent:
            if type(rank) is not int or rank not in ranks:
                raise ValueError(f"rank {rank!r} is none of this host")
            page = zlib.decompressobj().decompress(base64.b64decode(text), PAGE_BYTES)
            each = decode_page(page) if len(page) == PAGE_BYTES else None
            if each is None:
                raise ValueError("a page that is none, or has no word")
            silent_s[rank] = float(silence_s)
            word = each.word._replace(since_ns=now_ns() - int(silent_s[rank] * 1e9))
            progress[rank] = replace(each, word=word)
    except (ArithmeticError, AttributeError, TypeError, RecursionError, zlib.error) as error:
        raise ValueError(f"a look that is none: {error!r}") from error
    return Look(progress, silent_s)
