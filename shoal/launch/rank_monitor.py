"""The watchdog's body in the launcher: it looks at words, states and the clock.

It tells of ranks that hang or are slow. The report of a hang says who did not come, in
which part of a step, and where its code stands.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from shoal.launch.failure import Failure
from shoal.launch.output import print_line, print_note
from shoal.launch.rank_set import SECONDS_BETWEEN_LOOKS, RankSet
from shoal.watchdog.hang_detector import Hang, find_hang
from shoal.watchdog.progress_word import (
    KINDS,
    PHASE_NAMES,
    RECV,
    SEND,
    SERVERS,
    Phase,
    RankProgress,
)
from shoal.watchdog.progress_writer import now_ns
from shoal.watchdog.straggler_detector import StragglerDetector

EXIT_HANG = 124
"""Exit code of a launcher whose run has ended because of a hang; that of `timeout`."""
CURE = "A rank that is right and only slow needs a longer limit: --hang-limit SECONDS, 0 for none."


class RankMonitor:
    """Looks at the ranks of one start once a second.

    Args:
        source: the progress of the ranks.
    """

    def __init__(self, source: RankSet[Any]) -> None:
        self._source = source
        self._stragglers = StragglerDetector()
        self._next_s = 0.0

    def poll(self) -> list[Failure]:
        """Return the failure of a rank that does not come; tell of it, and of slow ranks."""
        limit_s = self._source.hang_limit_s
        if limit_s == 0 or time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + SECONDS_BETWEEN_LOOKS
        progress = self._source.look()
        for slow in self._stragglers.look(progress):
            print_note(slow.describe(len(self._source.all), self._source.host(slow.rank)))
        hang = find_hang(progress, limit_s)
        if hang is None:
            return []
        headline = self._headline(hang, progress)
        print_line(self._report(hang, headline, progress))
        return [Failure(hang.late, headline, code=EXIT_HANG, is_loss=True)]

    def _headline(self, hang: Hang, progress: Mapping[int, RankProgress]) -> str:
        """Return the rest of a sentence that begins with the late rank. It has no times."""
        late = progress[hang.late]
        if hang.is_deadlock:
            doing = f"waits in {describe_call(late)}, and no rank that it waits for comes"
            if late.word.kind == SERVERS:
                doing = "waits for the parameter servers, which do not answer"
            elif hang.waiter is not None and progress[hang.waiter].word.waits:
                other = describe_call(progress[hang.waiter])
                doing = (
                    f"waits in {describe_call(late)}, and rank {hang.waiter} in {other}, which are "
                    "not the same call. All ranks must make the same calls in the same order: none "
                    "may leave a loop, or call run or a sharded model, by a condition of its own"
                )
            return f"hangs: it {doing}"
        doing = PHASE_NAMES[Phase(late.word.phase)]
        if hang.waiter is None:
            return f"hangs in {doing}"
        call = describe_call(progress[hang.waiter])
        waiter = self._name(hang.waiter)
        return f"did not come: it is in {doing}, while {waiter} waits for it in {call}"

    def _report(self, hang: Hang, headline: str, progress: Mapping[int, RankProgress]) -> str:
        """Return all that is known of a hang: progress of every rank, and two ranks' stacks."""
        lines = [
            f"{self._name(hang.late, f' of {len(self._source.all)}')} {headline}",
            f"No sign of it for {hang.silent_s:.0f} s; the limit is {hang.limit_s:.0f} s. {CURE}",
        ]
        lines += [
            f"  {self._name(rank)}: {describe(each)}" for rank, each in sorted(progress.items())
        ]
        chosen = [hang.late] if hang.waiter is None else [hang.late, hang.waiter]
        return "\n".join([*lines, *map(self._source.stacks, chosen)])

    def _name(self, rank: int, of_world: str = "") -> str:
        host = self._source.host(rank)
        return f"rank {rank}{of_world}{f' on {host}' if host else ''}"


def describe(progress: RankProgress) -> str:
    """Return one line about a rank's word, such as `step 7: the forward pass, for 61 s`."""
    word = progress.word
    silent_s = max(0, now_ns() - word.since_ns) * 1e-9
    phase = PHASE_NAMES[Phase(word.phase)]
    doing = f"waits in {describe_call(progress)}, {phase}" if word.waits else phase
    if not word.waits and word.call:
        doing += f"; its last collective was {describe_call(progress)}"
    return f"step {word.step + 1}: {doing}; unchanged for {silent_s:.0f} s"


def describe_call(progress: RankProgress) -> str:
    """Return the text for the last collective or message that a rank has begun."""
    word = progress.word
    count = f"({word.length:,} numbers)" if word.length else "()"
    if word.kind in (SEND, RECV):
        direction = "to" if word.kind == SEND else "from"
        peer = "any rank" if word.peer < 0 else f"rank {word.peer}"
        return f"{KINDS[word.kind]}{count} {direction} {peer}"
    if word.kind == SERVERS:
        return "a wait for parameter servers"
    if word.kind >= len(KINDS):
        return "no collective yet"
    kind = "a collective that Gloo makes" if KINDS[word.kind] == "gloo" else KINDS[word.kind]
    group = progress.groups.get(word.group)
    ranks = f" of a group of ranks {list(group)}" if group else ""
    return f"{kind}{count} (call {word.call:,}{ranks})"
