"""Progress words of several hosts: from agents' looks by messages to the detector of the driver.

Time is simulated, and so are the ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch.hosts.agent_process import TELL_S, sent_look
from shoal.launch.hosts.agent_session import MessageReader, encode
from shoal.launch.hosts.driver_session import HostEvent
from shoal.launch.hosts.remote_ranks import HostRanks, RemoteRanks
from shoal.watchdog.hang_detector import Hang, SilenceCounter, find_hang
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
    Phase,
    ProgressWord,
    RankProgress,
    StepTimes,
    group_id,
)
from shoal.watchdog.progress_writer import now_ns

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
        place = (Phase.FORWARD, self.flags, 7, self.call, WORLD)
        word = ProgressWord(since_ns, *place, kind, -1, 10)
        return RankProgress(word, {WORLD: self.call}, {WORLD: [0, 1, 2]}, list(self.steps))


def page_of(progress: RankProgress) -> bytes:
    """Return a page as a rank writes it."""
    page = bytearray(PAGE_BYTES)
    WORD.pack_into(page, 0, *progress.word)
    for times in progress.steps:
        STEP.pack_into(page, RING_AT + STEP.size * (times.step % STEPS), *times)
    for place, (group, calls) in enumerate(progress.calls.items()):
        COUNT.pack_into(page, GROUPS_AT + COUNT.size * place, group, calls)
    groups = {str(number): list(ranks) for number, ranks in progress.groups.items()}
    text = json.dumps({"groups": groups}).encode()
    LENGTH.pack_into(page, TEXT_AT, len(text))
    page[TEXT_AT + LENGTH.size : TEXT_AT + LENGTH.size + len(text)] = text
    return bytes(page)


class Agent:
    """The ranks of one host as its agent sees them; in place of Ranks and of their memory."""

    def __init__(self, ranks: dict[int, Rank], clock_ns: int) -> None:
        self.ranks, self.clock_ns = ranks, clock_ns
        self.passed_s, self.is_halted = 0.0, False
        self.silence = SilenceCounter()
        self.progress = self

    @property
    def alive(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(number=number) for number in self.ranks]

    def page(self, rank: int) -> bytes:
        return page_of(self.ranks[rank].progress(self.clock_ns))

    def look(self) -> dict[int, RankProgress]:
        progress = {rank: each.progress(self.clock_ns) for rank, each in self.ranks.items()}
        now_s = self.clock_ns * 1e-9 + self.passed_s
        return self.silence.look(progress, now_s, self.is_halted)


class Hosts:
    """Two hosts, with ranks 0 and 1 on the first and rank 2 on the second, and their driver.

    It is the HostConnections of the driver too. A silent host answers nothing.
    """

    def __init__(self) -> None:
        # The hosts were started on different days.
        self.agents = {0: Agent({0: Rank(), 1: Rank()}, 10**15), 1: Agent({2: Rank()}, 5)}
        self.silent: set[int] = set()
        self.session = None
        connections: Any = self
        self.driver = RemoteRanks(connections, [HostRanks(0, 0, 2), HostRanks(1, 2, 1)])

    def tell(self) -> None:
        """Let each host that is not silent tell its look."""
        for host in self.agents.keys() - self.silent:
            look: Any = sent_look(self.agents[host])  # type: ignore[arg-type]
            (message,) = MessageReader().feed(encode("look", look=look))
            assert self.driver._rank_events(HostEvent(host, message)) == []

    def passes(self, seconds: int) -> Hang | None:
        """Return the first hang that is found; agents and the driver look once a second."""
        for second in range(seconds):
            for agent in self.agents.values():
                agent.passed_s += 1.0
                agent.look()
            if second % TELL_S == 0:
                self.tell()
            if (hang := find_hang(self.driver.look(), LIMIT_S)) is not None:
                return hang
        return None

    def wait_for_the_second_host(self) -> None:
        for rank in self.agents[0].ranks.values():
            rank.flags, rank.call, rank.written = WAITS, 6, 2


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def test_what_a_host_has_seen_arrives_with_the_drivers_time_of_it(hosts: Hosts) -> None:
    rank = hosts.agents[1].ranks[2]
    rank.steps = [StepTimes(1, 5, 2, 1), StepTimes(2, 7, 2, 1)]
    hosts.tell()
    look = hosts.driver.look()
    expected, progress = rank.progress(0), look[2]
    assert abs(progress.word.since_ns - now_ns()) < SECOND
    assert progress.word == expected.word._replace(since_ns=progress.word.since_ns)
    assert (progress.calls, progress.groups) == (expected.calls, expected.groups)
    assert progress.steps == expected.steps
    assert {rank: each.silent_s for rank, each in look.items()} == {0: 0.0, 1: 0.0, 2: 0.0}


def test_a_silent_host_is_no_hang_and_a_rank_that_hangs_is_one_once_its_host_speaks(
    hosts: Hosts,
) -> None:
    hosts.passes(5)
    hosts.wait_for_the_second_host()
    hosts.silent = {1}
    assert hosts.passes(100) is None
    hosts.silent = set()
    hang = hosts.passes(20)
    assert hang is not None
    assert hang.late == 2


def test_a_rank_that_went_on_while_its_host_did_not_answer_is_not_late(hosts: Hosts) -> None:
    hosts.wait_for_the_second_host()
    assert hosts.passes(int(LIMIT_S - 2)) is None
    hosts.silent = {1}
    assert hosts.passes(20) is None
    hosts.agents[1].ranks[2].written += 1
    hosts.silent = set()
    assert hosts.passes(int(LIMIT_S - 2)) is None


def test_nobody_is_late_while_the_rank_that_others_wait_for_is_in_a_debugger(hosts: Hosts) -> None:
    hosts.wait_for_the_second_host()
    hosts.agents[1].is_halted = True
    assert hosts.passes(100) is None
    hosts.agents[1].is_halted = False
    assert hosts.passes(20) is not None


def test_a_rank_that_writes_its_word_just_now_is_left_out_of_a_look() -> None:
    ranks: Any = SimpleNamespace(
        alive=[SimpleNamespace(number=0)],
        progress=SimpleNamespace(page=lambda _: bytes(PAGE_BYTES)),
        look=lambda: {0: Rank().progress(0)},
    )
    assert sent_look(ranks) == []
