"""Ranks that die, stop or send nothing: the ranks that wait for a message name them."""

import os
import random
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_exit import wait_for_the_end

from shoal.errors import CollectiveFailed, PeerLost
from shoal.shm_backend.gloo_calls import GlooCalls
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

TIMEOUT_S = {signal.SIGSTOP: 3.0, signal.SIGKILL: 60.0}  # who is slow for so long counts as stopped
LONGEST_S = 90.0  # only a machine that is far too busy makes it more than seconds
SEEDS = [seed if seed < 3 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_dies_or_stops_between_messages_is_named_in_time(seed: int) -> None:
    chance = random.Random(seed)
    victim, number = chance.randrange(2), (signal.SIGKILL, signal.SIGSTOP)[seed % 2]
    with world.start(2, _until_it_fails, seed, victim, number, timeout_s=LONGEST_S) as running:
        wait_for_the_end(running.pids[1 - victim], LONGEST_S)
        running.kill(victim)
        codes = running.wait()
    assert codes[1 - victim] == 0, running.failures
    assert not [name for name in os.listdir("/dev/shm") if "shoal" in name]


def _until_it_fails(seed: int, victim: int, number: signal.Signals) -> None:
    chance, group = (
        random.Random(seed),
        dist.new_group(timeout=timedelta(seconds=TIMEOUT_S[number])),
    )
    assert isinstance(group, ShoalGroup)
    if dist.get_rank() == victim:
        _fall(chance.randint(1, 60), number)
    begin = time.monotonic()
    with pytest.raises(CollectiveFailed) as caught:
        _talk(random.Random(seed + 1), group)
    text = str(caught.value)
    assert re.search(rf"(send|recv)\(.* rank {victim}, tag", text), text
    assert isinstance(caught.value, PeerLost) == (number == signal.SIGKILL), text
    assert number == signal.SIGKILL or "is stopped" in text
    assert time.monotonic() - begin < TIMEOUT_S[number] + LONGEST_S / 2
    os._exit(0)  # not all of the world can take leave


def _fall(steps: int, number: int) -> None:
    """Send a signal to this rank after a number of messages."""
    posted, message = [0], GlooCalls.message

    def struck(self: GlooCalls, *args: Any) -> dist.Work:
        posted[0] += 1
        if posted[0] > steps:
            os.kill(os.getpid(), number)
        return message(self, *args)

    GlooCalls.message = struck  # type: ignore[method-assign]


def _talk(chance: random.Random, group: ShoalGroup) -> None:
    """Exchange messages until a rank is missing, and check each of them."""
    rank = dist.get_rank()
    for step in range(10_000):
        length, tag = chance.choice((1, 1000, 300_000, 1_500_000)), chance.randrange(3)
        into = torch.zeros(length)
        works = [dist.isend(torch.full((length,), float(step)), 1 - rank, group, tag)]
        works.append(dist.irecv(into, 1 - rank, group, tag))
        for work in works if chance.random() < 0.5 else reversed(works):
            assert work is not None
            work.wait()
        if not (into == step).all():
            os._exit(4)


def test_what_was_sent_comes_though_its_sender_has_ended() -> None:
    with world.start(2, _send_and_end) as running:
        assert running.wait() == [0, 0], running.failures


def _send_and_end() -> None:
    if dist.get_rank() == 0:
        for number in range(5):
            dist.send(torch.full((1000,), float(number)), 1)
        os._exit(0)
    time.sleep(0.3)
    for number in range(5):
        into = torch.zeros(1000)
        dist.recv(into, 0)
        assert (into == number).all()
        time.sleep(0.2)
    with pytest.raises(
        PeerLost, match=r"rank 0 \(process \d+\) has ended while rank 1 waited for it in recv\("
    ):
        dist.recv(torch.zeros(3), 0)
    os._exit(0)


def test_a_rank_that_ends_in_a_collective_of_gloo_is_named() -> None:
    with world.start(3, _gather_without_one) as running:
        assert running.wait() == [0, 0, 0], running.failures


def _gather_without_one() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    if dist.get_rank() == 2:  # alive until rank 0 has told who is not
        with pytest.raises((PeerLost, CollectiveFailed)):
            dist.recv(torch.zeros(3), 0)
        os._exit(0)
    if dist.get_rank() == 0:
        rows = [torch.zeros(3) for _ in range(3)]
        expected = r"rank 1 \(process \d+\) has ended while rank 0 waited for it in gather by Gloo"
        with pytest.raises(PeerLost, match=expected):
            dist.gather(torch.ones(3), rows, dst=0)
    os._exit(0)


def test_who_sends_nothing_is_named_after_the_time_out() -> None:
    assert world.run(2, _silent) == [True, True]


def _silent() -> bool:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank():
        begin = time.monotonic()
        with pytest.raises(
            CollectiveFailed, match=r"rank 1 waited 1 s in recv\(2 x float32 from rank 0.* is alive"
        ):
            dist.recv(torch.zeros(2), 0, group)
        assert time.monotonic() - begin < 30
        with pytest.raises(CollectiveFailed, match="nothing passes between these ranks any more"):
            dist.send(torch.zeros(2), 0, group)
    dist.barrier()
    return True
