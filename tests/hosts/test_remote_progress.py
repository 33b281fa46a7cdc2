"""Progress words of several hosts: from agents' looks by messages to the detectors of the driver.

Time is simulated, and so are the ranks.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.launch.hosts.agent_messages import MessageReader, encode
from shoal.launch.hosts.remote_progress import ReceivedProgress, SentProgress
from shoal.launch.rank_set import Halt, Look
from shoal.watchdog.hang_detector import Hang, HangDetector
from shoal.watchdog.look_clock import LookClock
from shoal.watchdog.progress_word import (
    COUNT,
    GROUPS_AT,
    LENGTH,
    NO_KIND,
    PAGE_BYTES,
    RING_AT,
    STEP,
    STEPS,
    TEXT_AT,
    WAITS,
    WORD,
    GroupMembers,
    Phase,
    ProgressWord,
    RankProgress,
    StepTimes,
    decode_page,
    group_id,
)

LIMIT_S = 10.0
WORLD = group_id("world", range(3))
SECOND = 10**9


@dataclass
class Rank:
    """A rank whose word the test writes, on a host with a clock of its own."""

    flags: int = 0
    call: int = 5
    written: int = 1
    steps: list[StepTimes] = field(default_factory=list)

    def progress(self, clock_ns: int) -> RankProgress:
        kind = 1 if self.flags & WAITS else NO_KIND
        since_ns = clock_ns + self.written
        place = (Phase.FORWARD, self.flags, 0, 7, self.call, WORLD)
        word = ProgressWord(since_ns, *place, kind, -1, 10, 0, 0)
        return RankProgress(
            word, {WORLD: self.call}, {WORLD: GroupMembers("world", (0, 1, 2))}, list(self.steps)
        )


def page_of(progress: RankProgress) -> bytes:
    """Return a page as a rank writes it."""
    page = bytearray(PAGE_BYTES)
    WORD.pack_into(page, 0, *progress.word)
    for times in progress.steps:
        STEP.pack_into(page, RING_AT + STEP.size * (times.step % STEPS), *times)
    for place, (group, calls) in enumerate(progress.calls.items()):
        COUNT.pack_into(page, GROUPS_AT + COUNT.size * place, group, calls)
    groups = {str(number): list(group) for number, group in progress.groups.items()}
    text = json.dumps({"groups": groups}).encode()
    LENGTH.pack_into(page, TEXT_AT, len(text))
    page[TEXT_AT + LENGTH.size : TEXT_AT + LENGTH.size + len(text)] = text
    return bytes(page)


class Host:
    """The ranks of one host as its agent sees them; in place of Ranks and of their memory."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.hosts, self.number, self.clock = hosts, number, LookClock()
        self.progress = self

    def page(self, rank: int) -> bytes:
        place = rank - self.hosts.first[self.number]
        return page_of(
            self.hosts.ranks[self.number][place].progress(self.hosts.clocks_ns[self.number])
        )

    def look(self) -> Look:
        hosts, number = self.hosts, self.number
        first = hosts.first[number]
        progress = {
            first + place: decode_page(self.page(first + place))
            for place in range(len(hosts.ranks[number]))
        }
        passed_s = self.clock.passed_s(hosts.now_s + hosts.clocks_ns[number] * 1e-9)
        return Look(progress, dict.fromkeys(progress, passed_s), hosts.halts[number])


class Hosts:
    """Two hosts, with ranks 0 and 1 on the first and rank 2 on the second, and their driver."""

    def __init__(self) -> None:
        self.ranks = {0: [Rank(), Rank()], 1: [Rank()]}
        self.first = {0: 0, 1: 2}
        self.clocks_ns = {0: 10**15, 1: 5}  # the hosts were started on different days
        self.halts: dict[int, Halt] = {0: "", 1: ""}
        agents: dict[int, Any] = {host: Host(self, host) for host in self.ranks}
        self.sent = {host: SentProgress(agent) for host, agent in agents.items()}
        self.received = ReceivedProgress({0: range(2), 1: range(2, 3)})
        self.detector = HangDetector(LIMIT_S)
        self.now_s = 100.0
        self.bytes = 0

    def agent_looks(self, host: int) -> None:
        lines = b"".join(encode(**message) for message in self.sent[host].look())
        self.bytes += len(lines)
        for message in MessageReader().feed(lines):
            self.received.receive(host, message, int(self.now_s * SECOND))

    def passes(self, seconds: int, silent: frozenset[int] = frozenset()) -> Hang | None:
        """Return the first hang that is found; `silent` hosts do not look, or nobody hears it."""
        for _ in range(seconds):
            self.now_s += 1.0
            for host in self.ranks.keys() - silent:
                self.agent_looks(host)
            look = self.received.look()
            hang = self.detector.look(look.progress, look.passed_s, bool(look.halt))
            if hang is not None:
                return hang
        return None

    def wait_for_the_second_host(self) -> None:
        for rank in self.ranks[0]:
            rank.flags, rank.call, rank.written = WAITS, 6, 2


def test_what_a_host_has_seen_arrives_with_the_drivers_time_of_it() -> None:
    hosts = Hosts()
    hosts.ranks[1][0].steps = [StepTimes(1, 5, 2, 1), StepTimes(2, 7, 2, 1)]
    hosts.agent_looks(1)
    hosts.now_s += 1
    hosts.ranks[1][0].steps.append(StepTimes(3, 8, 2, 1))
    hosts.agent_looks(1)
    look = hosts.received.look()
    expected = hosts.ranks[1][0].progress(0)
    (progress,) = look.progress.values()
    assert progress.word == expected.word._replace(since_ns=100 * SECOND)
    assert (progress.calls, progress.groups) == (expected.calls, expected.groups)
    assert (progress.steps, progress.pacing) == (expected.steps, "together")
    assert look.passed_s == {2: 1.0}


def test_the_last_steps_alone_are_kept() -> None:
    hosts = Hosts()
    for step in range(1, 101):
        hosts.ranks[1][0].steps = [StepTimes(n, n, 0, 0) for n in range(max(1, step - 32), step)]
        hosts.agent_looks(1)
    assert [times.step for times in hosts.received.look().progress[2].steps] == [*range(68, 100)]


def test_a_look_at_ranks_that_have_not_changed_takes_few_bytes() -> None:
    hosts = Hosts()
    hosts.passes(1)
    hosts.bytes = 0
    hosts.passes(1)
    assert hosts.bytes < 150


def test_a_late_rank_of_another_host_is_named() -> None:
    hosts = Hosts()
    assert hosts.passes(5) is None
    hosts.wait_for_the_second_host()
    hang = hosts.passes(20)
    assert hang is not None
    assert (hang.late, hang.waiter, hang.is_deadlock) == (2, 0, False)
    assert hang.silent_s == LIMIT_S


def test_a_silent_host_is_no_hang_and_a_rank_that_hangs_is_one_once_its_host_speaks() -> None:
    hosts = Hosts()
    hosts.passes(5)
    hosts.wait_for_the_second_host()
    assert hosts.passes(100, silent=frozenset({1})) is None
    hang = hosts.passes(20)
    assert hang is not None
    assert hang.late == 2


def test_the_ranks_of_a_lost_host_are_not_judged() -> None:
    hosts = Hosts()
    hosts.passes(5)
    hosts.received.lost(1)
    assert hosts.received.look().progress.keys() == {0, 1}


def test_nobody_is_late_while_one_rank_is_in_a_debugger_or_all_are_stopped() -> None:
    hosts = Hosts()
    hosts.wait_for_the_second_host()
    hosts.halts[1] = "traced"
    assert hosts.passes(100) is None
    hosts.halts = {0: "stopped", 1: "stopped"}
    assert hosts.passes(100) is None
    hosts.halts[1] = ""
    assert hosts.passes(20) is not None


NO_GROUPS = (b"\1" * TEXT_AT + LENGTH.pack(13) + b'{"groups":[]}').ljust(PAGE_BYTES, b"\0")


def packed(page: bytes) -> str:
    return base64.b64encode(zlib.compress(page)).decode()


@pytest.mark.parametrize(
    "message",
    [
        {"do": "page", "rank": 0, "page": packed(bytes(range(1, 129)) * 64)},
        {"do": "page", "rank": 2, "page": packed(bytes(PAGE_BYTES))},
        {"do": "page", "rank": 2, "page": packed(b"short")},
        {"do": "page", "rank": 2, "page": "no text in base64"},
        {"do": "page", "rank": 2, "page": 7},
        {"do": "page", "rank": 2, "page": packed(NO_GROUPS)},
        {"do": "page", "rank": 2},
        {"do": "looked", "ranks": [2], "passed_s": 1.0, "halt": ""},
        {"do": "looked", "ranks": [], "passed_s": 1.0, "halt": "asleep"},
    ],
)
def test_what_no_agent_sends_is_an_error(message: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        ReceivedProgress({1: range(2, 3)}).receive(1, message, 1)
