"""The report of a hang: who did not come, in which part of a step, and where its code stands.

Ranks write their stacks into memory of this process when they get STACKS_SIGNAL, also while they
sleep or are in C with the interpreter locked. A stopped process writes nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress

from shoal.launch.rank import STACKS_SIGNAL
from shoal.launch.ranks import Rank, Ranks
from shoal.platform.processes import PROC, process_state
from shoal.watchdog.hang_detector import Hang
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

STACK_LIMIT_S = 1.0
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel (disk?)"}
OUTER_FRAMES = ("<frozen runpy>", "shoal/launch/rank.py", "/multiprocessing/", '"<string>"')
CURE = "A rank that is right and only slow needs a longer limit: --hang-limit SECONDS, 0 for none."


def headline(hang: Hang) -> str:
    """Return the rest of a sentence that begins with the late rank. It has no times."""
    late = hang.progress[hang.late]
    if hang.is_deadlock:
        doing = f"waits in {describe_call(late)}, and no rank that it waits for comes"
        if late.word.kind == SERVERS:
            doing = "waits for the parameter servers, which do not answer"
        return f"hangs: it {doing}"
    doing = PHASE_NAMES[Phase(late.word.phase)]
    if hang.waiter is None:
        return f"hangs in {doing}"
    call = describe_call(hang.progress[hang.waiter])
    return f"did not come: it is in {doing}, while rank {hang.waiter} waits for it in {call}"


def report(hang: Hang, ranks: Ranks) -> str:
    """Return all that is known of a hang: progress of every rank, and two ranks' stacks."""
    world = len(ranks.all)
    lines = [
        f"rank {hang.late} of {world} {headline(hang)}",
        f"No sign of it for {hang.silent_s:.0f} s; the limit is {hang.limit_s:.0f} s. {CURE}",
    ]
    lines += [f"  rank {rank}: {describe(each)}" for rank, each in sorted(hang.progress.items())]
    chosen = [hang.late] if hang.waiter is None else [hang.late, hang.waiter]
    by_number = {rank.number: rank for rank in ranks.alive}
    for number in chosen:
        if number in by_number:
            lines.append(_stacks(by_number[number], ranks))
    return "\n".join(lines)


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
    ranks = f" of a group of ranks {list(group.ranks)}" if group else ""
    return f"{kind}{count} (call {word.call:,}{ranks})"


def _stacks(rank: Rank, ranks: Ranks) -> str:
    """Return the stacks of all threads of a rank, or why there are none."""
    ranks.progress.clear_stacks()
    rank.signal(STACKS_SIGNAL)
    text, limit_s = "", time.monotonic() + STACK_LIMIT_S
    while time.monotonic() < limit_s:
        time.sleep(0.05)
        before, text = text, ranks.progress.stacks()
        if text and text == before:
            break
    state = process_state(rank.pid)
    where = f"process {rank.pid}, {STATES.get(state or '', 'alive')}{_kernel_place(rank.pid)}"
    if not text:
        return f"rank {rank.number} ({where}) has not written its stack."
    return f"The stack of rank {rank.number} ({where}):\n{_own_frames(text)}"


def _own_frames(text: str) -> str:
    """Return the stacks without the frames that have started the rank."""
    lines = text.rstrip().splitlines()
    return "\n".join(line for line in lines if not any(part in line for part in OUTER_FRAMES))


def _kernel_place(pid: int) -> str:
    with suppress(OSError):
        place = (PROC / str(pid) / "wchan").read_text().strip()
        return f", in the kernel's {place}" if place not in ("", "0") else ""
    return ""
