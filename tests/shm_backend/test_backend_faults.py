"""Ranks that die, stop, fail or call something else: the others raise an error that names the rank,
within the timeout of the group or of the call.
"""

import os
import random
import re
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from process_exit import wait_for_the_end
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.torch_private.c10d import Options
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

TIMEOUT_S = {signal.SIGSTOP: 4.0, signal.SIGKILL: 60.0}  # who is slow for so long counts as stopped
LONGEST_S = 100.0  # only a machine that is far too busy makes it more than seconds
SEEDS = [seed if seed < 5 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(300)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_dies_or_stops_in_a_collective_is_named_in_time(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(2, 4)
    victim, number = chance.randrange(ranks), chance.choice((signal.SIGKILL, signal.SIGSTOP))
    with world.start(ranks, _until_it_fails, seed, victim, number, timeout_s=LONGEST_S) as running:
        pids = running.pids
        for rank in set(range(ranks)) - {victim}:
            wait_for_the_end(pids[rank], LONGEST_S)
        running.kill(victim)
        codes = running.wait()
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0] * (ranks - 1), (
        running.failures
    )
    assert not [name for name in os.listdir("/dev/shm") if "shoal" in name]


def _until_it_fails(seed: int, victim: int, number: signal.Signals) -> None:
    chance, group = (
        random.Random(seed),
        dist.new_group(timeout=timedelta(seconds=TIMEOUT_S[number])),
    )
    assert isinstance(group, ShoalGroup)
    if dist.get_rank() == victim:
        _fall(group, chance.randint(1, 40), number, before=chance.random() < 0.5)
    error, took_s = _error_of_calls(random.Random(seed + 1), group)
    text = str(error)
    assert f"rank {victim} " in text
    assert (
        number == signal.SIGSTOP or isinstance(error, PeerLost) or "cannot be used any more" in text
    )
    assert number == signal.SIGKILL or isinstance(error, PeerLost) or "is stopped" in text
    assert re.search(r"(all_reduce|broadcast|all_gather|reduce_scatter|barrier)\(", text)
    assert took_s < TIMEOUT_S[number] + LONGEST_S / 2
    os._exit(0)  # not all of the world can take leave


def _error_of_calls(steps: random.Random, group: ShoalGroup) -> tuple[CollectiveFailed, float]:
    """Return the error of one of many calls, and the seconds until it."""
    for step in range(1000):
        begin = time.monotonic()
        try:
            _one_call(steps, group, dist.get_rank(), dist.get_world_size(), step)
        except CollectiveFailed as error:
            return error, time.monotonic() - begin
    raise AssertionError("nothing failed")


def _fall(group: ShoalGroup, phase: int, number: int, before: bool) -> None:
    """Send a signal to this rank when it publishes a phase."""
    publish = group._board.publish

    def struck() -> None:
        if not before:
            publish()
        if group._board.phase >= phase - before:
            os.kill(os.getpid(), number)
        if before:
            publish()

    group._board.publish = struck  # type: ignore[method-assign]


def _one_call(chance: random.Random, group: ShoalGroup, rank: int, size: int, step: int) -> None:
    """Make a random call, the same on all ranks, and check its result."""
    kind, length, later = (
        chance.randrange(5),
        chance.choice((3, 1000, 600_000)),
        chance.random() < 0.5,
    )
    own, work = torch.full((length,), float(rank + step)), None
    expected = float(sum(range(size)) + size * step)
    if kind == 0:
        work, result = dist.all_reduce(own, group=group, async_op=later), own
    elif kind == 1:
        work, result, expected = (
            dist.broadcast(own, src=0, group=group, async_op=later),
            own,
            float(step),
        )
    elif kind == 2:
        result = torch.zeros(size, length)
        work, expected = (
            dist.all_gather(list(result.unbind()), own, group=group, async_op=later),
            -1.0,
        )
    elif kind == 3:
        result = torch.zeros(length)
        work = dist.reduce_scatter(result, [own] * size, group=group, async_op=later)
    else:
        work, result = dist.barrier(group=group, async_op=later), torch.full((1,), expected)
    if work is not None:
        work.wait()
    wanted = torch.arange(size)[:, None] + step if expected < 0 else torch.tensor(expected)
    if not (result == wanted).all():
        os._exit(4)


def test_a_rank_that_leaves_the_others_alone_is_named() -> None:
    assert world.run(3, _leave_early) == ["", True, True]


def _leave_early() -> str | bool:
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(4), group=group)
    said: str | bool = ""
    if dist.get_rank():
        with pytest.raises(CollectiveFailed) as caught:
            dist.all_reduce(torch.ones(5), group=group)
        said = bool(
            re.search(
                r"waited 2 s in all_reduce\(5 x float32, sum\) \(call 2 .*rank 0 .*has made 1 call",
                f"{caught.value}",
            )
            or "gave up" in str(caught.value)
        )
    dist.barrier()
    return said


@pytest.mark.parametrize("wrong", ["length", "type", "operation", "kind"])
def test_ranks_that_differ_in_their_calls_get_an_error_at_once(wrong: str) -> None:
    texts = world.run(3, _differ, wrong)
    assert all(" calls " in text for text in texts)
    assert any(
        re.search(r"rank [02] calls all_reduce\(8 x float32, sum\) where rank 1 calls", text)
        for text in texts
    )


def _differ(wrong: str) -> str:
    group, tensor = dist.new_group(timeout=timedelta(seconds=10)), torch.full((8,), 7.0)
    if dist.get_rank() != 1:
        calls = [partial(dist.all_reduce, tensor, group=group)]
    else:
        calls = {
            "length": [partial(dist.all_reduce, tensor[:7], group=group)],
            "type": [partial(dist.all_reduce, tensor.to(torch.float64), group=group)],
            "operation": [partial(dist.all_reduce, tensor, dist.ReduceOp.MAX, group=group)],
            "kind": [partial(dist.broadcast, tensor, src=1, group=group)],
        }[wrong]
    *before, last = calls
    for call in before:
        call()
    with pytest.raises(CollectiveFailed) as caught:
        last()
    assert (tensor == 7.0).all()
    with pytest.raises(CollectiveFailed, match="cannot be used any more"):
        dist.barrier(group=group)
    dist.barrier()  # other groups can
    return str(caught.value)


def test_an_error_reaches_whoever_waits_for_a_call_made_earlier() -> None:
    assert world.run(2, _fail_later) == [True, True]


def _fail_later() -> bool:
    group = dist.new_group(timeout=timedelta(seconds=10))
    if dist.get_rank():
        time.sleep(0.2)
        with pytest.raises(CollectiveFailed, match=" calls "):
            dist.all_reduce(torch.ones(11), group=group)
        return True
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    future = work.get_future()
    with pytest.raises(CollectiveFailed, match=" calls "):
        work.wait()
    with pytest.raises(RuntimeError, match=" calls "):
        future.wait()
    return work.is_completed() and not work.is_success()


def test_a_rank_that_leaves_with_a_call_under_way_does_not_wait_for_ever() -> None:
    assert world.run(2, _leave_with_a_call) == [True, True]


def _leave_with_a_call() -> bool:
    group = dist.new_group(timeout=timedelta(minutes=10))
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(
            CollectiveFailed, match=r"left its group before all_reduce\(3 x float32, sum\)"
        ):
            work.wait()
    dist.barrier()
    return True


def test_a_thread_that_fails_fails_its_calls_and_goes_on() -> None:
    assert world.run(2, _fail_in_the_thread) == [True] * 2


def _fail_in_the_thread() -> bool:
    group = dist.new_group()
    assert isinstance(group, ShoalGroup)
    if dist.get_rank() == 0:
        group._board.fail = _refuse  # type: ignore[method-assign]
        # The other rank never comes: the wait for it fails, and so does the report of the failure.
        options = torch._C._distributed_c10d.AllreduceOptions()
        works = [group.allreduce([torch.ones(2)], options)]
        assert group._queue is not None
        group._queue._waiter.set_deadline(0.0)
        works.append(group.allreduce([torch.ones(3, dtype=torch.int64)], options))
        for work in works:
            with pytest.raises(RuntimeError, match=r"left its group|refused"):
                work.wait()
        assert group._queue._thread is not None
        assert group._queue._thread.is_alive()
    dist.barrier()
    return True


def _refuse(text: str) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize("ranks", [2, 3])
def test_roots_that_differ_are_an_error_on_all_ranks_at_once(ranks: int) -> None:
    assert world.run(ranks, _differ_in_roots) == [True] * ranks


def _differ_in_roots() -> bool:
    """Broadcast from root 1 on the last rank and from root 0 on the others."""
    root = 1 if dist.get_rank() == dist.get_world_size() - 1 else 0
    group = dist.new_group(timeout=timedelta(seconds=20))
    with pytest.raises(CollectiveFailed, match=r" calls broadcast\("):
        dist.broadcast(torch.ones(5), src=root, group=group)
    dist.barrier()
    return True


@pytest.mark.parametrize("kind", ["gather", "all_reduce"])
def test_a_rank_whose_call_gloo_makes_is_named_after_the_time_out(kind: str) -> None:
    waiting, _ = world.run(2, _differ_in_transport, kind)
    assert "waited 1 s in all_reduce(4 x float32, sum)" in waiting
    assert "rank 1 (process " in waiting


def _differ_in_transport(kind: str) -> str:
    """Reduce numbers on rank 0, and on rank 1 what only Gloo takes, or gather."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    rows = [torch.zeros(4), torch.zeros(4)]
    calls = {
        "gather": partial(dist.gather, torch.ones(4), rows, dst=1, group=group),
        "all_reduce": partial(dist.all_reduce, torch.eye(3).to_sparse(), group=group),
    }
    call = calls[kind] if dist.get_rank() else partial(dist.all_reduce, rows[0], group=group)
    with pytest.raises(CollectiveFailed) as caught:
        call()
    dist.barrier()
    return str(caught.value)


SHORT = timedelta(seconds=0.4)


def test_a_call_ends_at_the_timeout_that_was_set_last_or_at_its_own() -> None:
    assert world.run(2, _wait_in_vain) == [["waited 0.4 s"] * 4, []]


def _wait_in_vain() -> list[str]:
    groups = [dist.new_group(timeout=timedelta(minutes=10)) for _ in range(4)]
    said = []
    if dist.get_rank() == 0:
        _set_pg_timeout(SHORT, groups[0])
        said.append(_error(lambda: dist.all_reduce(torch.ones(2), group=groups[0])))
        groups[1].set_timeout(SHORT)
        said.append(_error(lambda: dist.barrier(group=groups[1])))
        options = Options.BroadcastOptions()
        options.rootRank, options.timeout, options.asyncOp = 1, SHORT, False
        said.append(_error(lambda: groups[2].broadcast([torch.ones(2)], options).wait()))
        reduction = Options.AllreduceOptions()
        reduction.timeout = SHORT  # the thread of the group waits for this one
        said.append(_error(lambda: groups[3].allreduce([torch.ones(2)], reduction).wait()))
    dist.barrier()
    return said


def _error(call: object) -> str:
    assert callable(call)
    with pytest.raises(CollectiveFailed) as caught:
        call()
    text = str(caught.value)
    assert "rank 1" in text
    return text[text.index("waited") :][:12]
