"""The progress of ranks on several hosts, as the driver knows it from messages of their agents.

    "page"      the page of a rank that has changed, see `shoal.watchdog.progress_word`
    "looked"    the ranks that live, the time since the last look, and if they are halted

A "looked" follows the pages of its look. So a rank without a page in between has not changed.

No clock of a host is read here. An agent says how much time has passed between two of its looks,
and the time since which a word has not changed is the driver's own, from the receipt of the word.
A host that is silent counts no time: it is the lease that judges it. So a rank that cannot be seen
is never called late, nor is one that waits for it.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shoal.launch.hosts.agent_messages import Message
from shoal.launch.rank_set import Halt, Look
from shoal.launch.ranks import Ranks
from shoal.watchdog.look_clock import MAX_LOOK_S
from shoal.watchdog.progress_word import PAGE_BYTES, ProgressWord, RankProgress, decode_page

HALTS: tuple[Halt, ...] = ("", "stopped", "traced")


class SentProgress:
    """The agent's side: it turns looks at this host's ranks into messages."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pages: dict[int, bytes] = {}

    def look(self) -> list[Message]:
        """Look at the ranks. Return the messages in their order, each with its kind under "do"."""
        look = self.ranks.look()
        messages: list[Message] = []
        for rank in look.progress:
            page = self.ranks.progress.page(rank)
            if page != self._pages.get(rank):
                self._pages[rank] = page
                text = base64.b64encode(zlib.compress(page, 1)).decode()
                messages.append({"do": "page", "rank": rank, "page": text})
        passed_s = max(look.passed_s.values(), default=0.0)
        ranks = sorted(look.progress)
        messages.append({"do": "looked", "ranks": ranks, "passed_s": passed_s, "halt": look.halt})
        return messages


class ReceivedProgress:
    """The driver's side: the words that agents have sent in one epoch.

    Args:
        hosts: the ranks of each host that has some.
    """

    def __init__(self, hosts: Mapping[int, range]) -> None:
        self._hosts = hosts
        # The word as it was sent, and the progress with the driver's time of its receipt.
        self._progress: dict[int, tuple[ProgressWord, RankProgress]] = {}
        self._alive: dict[int, list[int]] = {}
        self._passed_s: defaultdict[int, float] = defaultdict(float)
        self._halts: dict[int, Halt] = {}

    def receive(self, host: int, message: Message, now_ns: int) -> None:
        """Take a message of a host's agent, of the kind "page" or "looked".

        Args:
            now_ns: the driver's time.

        Raises:
            KeyError, TypeError, ValueError: no agent sends this.
        """
        if message["do"] == "page":
            rank, progress = self._rank(host, message["rank"]), _unpacked(message["page"])
            if rank in self._progress and self._progress[rank][0] == progress.word:
                now_ns = self._progress[rank][1].word.since_ns
            received = replace(progress, word=progress.word._replace(since_ns=now_ns))
            self._progress[rank] = progress.word, received
            return
        alive = [self._rank(host, rank) for rank in message["ranks"]]
        if not set(alive) <= self._progress.keys():
            raise ValueError("a look without the pages of its ranks")
        self._alive[host] = alive
        self._passed_s[host] += min(max(float(message["passed_s"]), 0.0), MAX_LOOK_S)
        self._halts[host] = HALTS[HALTS.index(message["halt"])]

    def lost(self, host: int) -> None:
        """Forget the ranks of a host that is lost."""
        self._alive.pop(host, None)
        self._halts.pop(host, None)

    def look(self) -> Look:
        """Return the progress of the ranks that live, with the times since the last call."""
        progress: dict[int, RankProgress] = {}
        passed_s: dict[int, float] = {}
        for host, ranks in self._alive.items():
            for rank in ranks:
                progress[rank] = self._progress[rank][1]
                passed_s[rank] = min(self._passed_s[host], MAX_LOOK_S)
        self._passed_s.clear()
        return Look(progress, passed_s, self._halt())

    def _halt(self) -> Halt:
        halts = [self._halts[host] for host, ranks in self._alive.items() if ranks]
        if "traced" in halts:
            return "traced"
        return "stopped" if halts and all(halt == "stopped" for halt in halts) else ""

    def _rank(self, host: int, value: object) -> int:
        if type(value) is not int or value not in self._hosts[host]:
            raise ValueError(f"rank {value!r} is none of this host")
        return value


def _unpacked(text: str) -> RankProgress:
    """Return the progress of a page. Raises ValueError for what is no page, whatever it is."""
    try:
        page = zlib.decompressobj().decompress(base64.b64decode(text), PAGE_BYTES)
        if len(page) == PAGE_BYTES and (progress := decode_page(page)) is not None:
            return progress
    except (AttributeError, TypeError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"a page that is none: {error!r}") from error
    raise ValueError("a page that is none, or has no word")
