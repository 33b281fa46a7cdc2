"""Detection of a rank that does not come, from progress words and time. No clock and no process.

    rank 0   waits in call 7 of its group ──┐ waits for      rank 1 is the late one: its own word
    rank 2   waits in call 7 of its group ──┴───────> rank 1   has not changed for the limit either

A rank that waits is never called late while another one that it waits for goes on, or has not been
silent for its own limit yet. If all wait for each other, they make different calls, or the network
carries nothing: then the one that is in the earliest call is named.

    rank 0   waits in call 7 of group A, which rank 1 has not begun ──> rank 1
    rank 1   waits in call 3 of group B, which rank 0 has not begun ──> rank 0

Such a cycle cannot end, so it has a short limit.

Silence is the time between the looks at a rank, see `SilenceCounter`. No clocks of two hosts are
compared: each host counts the silence of its own ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.watchdog.progress_word import (
    FIRST,
    RECV,
    SEND,
    SERVERS,
    THREAD_WAITS,
    WAITS,
    Phase,
    ProgressWord,
    RankProgress,
)

MAX_LOOK_S = 2.0
"""At most so much of the time between two looks counts. So nobody is late because the launcher
itself was stopped, or the host was suspended.
"""

SLOW_FACTOR = 10.0
"""The limit is so many times longer in a first step, where a compiler may work, in a save, and for
code of the user's between steps.
"""
STEP_FACTOR = 3.0
"""No rank is late before it has been silent for so many times its longest step."""
CYCLE_LIMIT_S = 5.0
"""The limit for ranks that wait for each other in collectives that the other has not begun."""
SLOWEST_BYTES_PER_S = 10e6
"""A collective may take the time of its bytes at this speed, besides the limit."""
NUMBER_BYTES = 8
SLOW_PHASES = (Phase.START, Phase.BETWEEN, Phase.SAVE, Phase.END)
NEEDS_WAITER = (Phase.START, Phase.BETWEEN, Phase.END)
"""Phases in which a rank may do anything for as long as it likes, while nobody waits for it."""


@dataclass(frozen=True)
class Hang:
    """A rank that does not come.

    Attributes:
        late: the rank.
        waiter: a rank that waits for it; None if nobody does.
        silent_s: time for which the late rank's word has not changed.
        limit_s: the limit that it has passed.
        is_deadlock: the late rank waits too, in another call.
    """

    late: int
    waiter: int | None
    silent_s: float
    limit_s: float
    is_deadlock: bool


class SilenceCounter:
    """Counts for how long the words of ranks have not changed, look after look."""

    def __init__(self) -> None:
        self._words: dict[int, object] = {}
        self._silent_s: dict[int, float] = {}
        self._last_s: float | None = None

    def look(
        self, progress: Mapping[int, RankProgress], now_s: float, paused: bool = False
    ) -> dict[int, RankProgress]:
        """Return the progress with the seconds that count since each word has changed.

        Args:
            progress: of the ranks that live.
            now_s: the time on one clock, which goes on while the host is suspended.
            paused: all ranks are stopped, or one is in a debugger: this look counts no time.
        """
        last_s, self._last_s = self._last_s, now_s
        passed_s = 0.0 if last_s is None or paused else min(max(now_s - last_s, 0.0), MAX_LOOK_S)
        for rank, each in progress.items():
            if self._words.get(rank) != each.word:
                self._words[rank] = each.word
                self._silent_s[rank] = 0.0
            else:
                self._silent_s[rank] += passed_s
        return {r: replace(each, silent_s=self._silent_s[r]) for r, each in progress.items()}


def find_hang(progress: Mapping[int, RankProgress], limit_s: float) -> Hang | None:
    """Return the hang that the words of all ranks of a run show, if there is one.

    Args:
        progress: of the ranks that live.
        limit_s: the limit, greater than 0.
    """
    if cycle := _cycle(progress, limit_s):
        silent_s = progress[cycle[0]].silent_s
        return Hang(cycle[0], cycle[1], silent_s, CYCLE_LIMIT_S, is_deadlock=True)
    # The first steps may have been compiled, and say nothing of later ones.
    steps = (times for each in progress.values() for times in each.steps if times.step > 2)
    longest_s = max((times.total_ns for times in steps), default=0) * 1e-9
    base_s = max(limit_s, STEP_FACTOR * longest_s)
    limits = {rank: _limit_s(each.word, base_s) for rank, each in progress.items()}
    silent = {rank for rank, each in progress.items() if each.silent_s >= limits[rank]}
    if not silent:
        return None
    edges = {rank: waits_for(rank, progress) for rank in progress}
    for rank in sorted(silent, key=lambda rank: (-progress[rank].silent_s, rank)):
        reached = _reached(rank, edges)
        if not reached <= silent:
            continue
        late, is_deadlock = _late(reached, edges, progress)
        waiters = [waiter for waiter in sorted(edges) if late in edges[waiter]]
        is_needed = is_deadlock or not silent.isdisjoint(waiters)
        if is_needed or progress[late].word.phase not in NEEDS_WAITER:
            waiter = next(iter(waiters), None)
            return Hang(late, waiter, progress[late].silent_s, limits[late], is_deadlock)
    return None


def _cycle(progress: Mapping[int, RankProgress], limit_s: float) -> list[int]:
    """Return ranks each of which waits in a collective that the next has not begun, or none."""
    limit_s = min(limit_s, CYCLE_LIMIT_S)
    silent = sorted(rank for rank, each in progress.items() if each.silent_s >= limit_s)
    for rank in silent:
        path = [rank]
        while behind := [r for r in silent if r in _has_not_begun(path[-1], progress)]:
            if behind[0] in path:
                return path[path.index(behind[0]) :]
            path.append(behind[0])
    return []


def _limit_s(word: ProgressWord, limit_s: float) -> float:
    if word.waits and word.kind != SERVERS:
        return limit_s + word.length * NUMBER_BYTES / SLOWEST_BYTES_PER_S
    is_slow = word.flags & FIRST or word.phase in SLOW_PHASES
    return limit_s * SLOW_FACTOR if is_slow else limit_s


def waits_for(rank: int, progress: Mapping[int, RankProgress]) -> set[int]:
    """Return the ranks without which `rank` cannot go on.

    A thread of torch may wait without a word of it. So a rank also counts as waiting for those that
    have begun fewer calls of a group of theirs.
    """
    own = progress[rank]
    word, others = own.word, progress.keys() - {rank}
    if word.flags & (WAITS | THREAD_WAITS):
        if word.kind in (SEND, RECV):
            return {word.peer} & others
        if word.kind == SERVERS:
            return {other for other in others if not progress[other].word.waits}
        members = _members(own, word.group, progress)
        behind = _behind(own, word.group, word.call, progress)
        return behind or {m for m in members if not progress[m].word.waits}
    found = (_behind(own, group, calls, progress) for group, calls in own.calls.items())
    return set().union(*found)


def _has_not_begun(rank: int, progress: Mapping[int, RankProgress]) -> set[int]:
    """Return the ranks that have not begun the collective in which the main thread of one waits.

    None where another thread of the rank waits too: it may bring the main thread on.
    """
    own = progress[rank]
    word = own.word
    if word.flags & (WAITS | THREAD_WAITS) != WAITS or word.kind in (SEND, RECV, SERVERS):
        return set()
    return _behind(own, word.group, word.call, progress)


def _behind(
    own: RankProgress, group: int, calls: int, progress: Mapping[int, RankProgress]
) -> set[int]:
    """Return the other members of a group that have begun fewer calls of it."""
    members = _members(own, group, progress)
    return {member for member in members if progress[member].calls.get(group, 0) < calls}


def _members(own: RankProgress, group: int, progress: Mapping[int, RankProgress]) -> set[int]:
    """Return the other members of a group that live."""
    ranks = own.groups.get(group, ())
    return {rank for rank in ranks if rank in progress and progress[rank] is not own}


def _reached(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that a rank waits for, directly or not, and itself."""
    found, remaining = {rank}, [rank]
    while remaining:
        new = edges[remaining.pop()] - found
        found |= new
        remaining += new
    return found


def _late(
    reached: set[int], edges: Mapping[int, set[int]], progress: Mapping[int, RankProgress]
) -> tuple[int, bool]:
    """Return the rank for which all others of these wait, and True if it waits as well."""
    computing = [rank for rank in reached if not progress[rank].word.waits]
    sinks = [rank for rank in reached if not edges[rank]]
    for candidates in ([r for r in computing if r in sinks], computing):
        if candidates:
            return min(candidates, key=lambda rank: (progress[rank].word.since_ns, rank)), False
    # All wait: the one that is in the earliest call.
    late = min(sinks or reached, key=lambda rank: (progress[rank].word.call, rank))
    return late, True
