"""Runs on several ranks: what their traces say, under every strategy, and what a trace leaves
as it was.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from traced_runs import LATE_S, run_traced

import shoal
from shoal.cli.trace import lines, to_json
from shoal.errors import LaunchError
from shoal.testing import world
from shoal.trace import chrome
from shoal.trace.breakdown import COMPONENTS, Breakdown, compute_breakdown
from shoal.trace.chrome import Trace
from shoal.trace.recorder import BACKWARD, EXCHANGE, FORWARD, STEP
from tests.harness.in_turn import in_turn


def traced(directory: Path, ranks: int = 2, *args: object) -> tuple[Trace, Breakdown]:
    for _, recording in world.run(ranks, run_traced, directory, *args):
        assert recording == 0  # nobody notes anything any more
    trace = chrome.read(directory)
    found = compute_breakdown(trace.spans)
    assert sorted(found.shares) == list(range(ranks))
    for shares in found.shares.values():
        assert sum(shares.parts_s[part] for part in COMPONENTS) == pytest.approx(shares.step_s)
        assert shares.parts_s["compute"] > 0
        assert shares.parts_s["optimizer"] > 0
    return trace, found


def names(trace: Trace, kind: str, rank: int = 0) -> list[str]:
    return [span.name for span in trace.spans[rank] if span.kind == kind]


@pytest.mark.parametrize("slow", ["data", "compute"])
def test_a_slow_rank_is_named_with_what_it_is_slow_at_and_the_other_waits(
    tmp_path: Path, slow: str
) -> None:
    trace, found = traced(tmp_path, 2, "ddp", "2@2", slow)
    told = json.loads(json.dumps(to_json(trace, found)))
    assert told["slowest"]["rank"] == 1
    assert told["ranks"]["0"]["waiting_s"] == found.shares[0].parts_s["waiting"]
    text = "\n".join(lines(trace, found))
    assert "steps 3 to 4, mean of 2, in milliseconds" in text
    assert "rank 1 is the slowest: the other one waited" in text
    assert f"ms more in {slow}" in text
    assert trace.steps == [3, 4]
    assert names(trace, STEP) == ["step 3", "step 4"]
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.part) == (1, slow)
    assert found.shares[1].parts_s[slow] >= LATE_S
    assert found.shares[0].parts_s["waiting"] > found.shares[1].parts_s["waiting"]
    assert found.slowest.waited_s == pytest.approx(found.shares[0].parts_s["waiting"])


def test_a_bucket_of_ddp_is_seen_with_its_bytes_on_both_ranks(tmp_path: Path) -> None:
    trace, found = traced(tmp_path)
    assert names(trace, FORWARD) == ["forward"] * 2
    assert names(trace, BACKWARD) == ["backward"] * 2
    assert "all_reduce" in names(trace, EXCHANGE)
    gradients = 4 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4 + 16)  # and sixteen totals
    assert found.shares[0].sent_bytes >= gradients
    assert found.shares[0].sent_bytes == found.shares[1].sent_bytes
    met = [
        {(s.collective_id, s.number) for s in spans if s.kind == EXCHANGE}
        for spans in trace.spans.values()
    ]
    assert met[0] == met[1]


@pytest.mark.slow
def test_zero_gathers_and_scatters(tmp_path: Path) -> None:
    trace, _ = traced(tmp_path, 2, "zero3")
    assert {"all_gather", "reduce_scatter"} <= {name.split()[0] for name in names(trace, EXCHANGE)}


def test_messages_of_a_pipeline_say_for_which_micro_batch_they_are(tmp_path: Path) -> None:
    trace, found = traced(tmp_path, 2, "pipeline=2,microbatches=4", "2@2", "data")
    assert {"F0 of stage 0", "F3 of stage 0"} <= set(names(trace, FORWARD))
    assert {"B0 of stage 1", "B3 of stage 1"} <= set(names(trace, BACKWARD, rank=1))
    assert {"send to 1 F0", "send to 1 F3", "recv from 1 B0", "recv from 1 B3"} <= set(
        names(trace, EXCHANGE)
    )
    assert {"recv from 0 F0", "send to 0 B3"} <= set(names(trace, EXCHANGE, rank=1))
    assert (
        found.shares[0].parts_s["waiting"] > LATE_S / 2
    )  # for gradients of a stage whose data come late


def test_pushes_and_pulls_of_parameter_servers_are_seen(tmp_path: Path) -> None:
    trace, _ = traced(tmp_path, 2, "server=1,part_mb=0.001", "2@2", "backward")
    parts = [name for name in names(trace, EXCHANGE) if name.startswith("push and pull part")]
    assert len(parts) % 2 == 0
    assert len(set(parts)) > 1
    # The server answers rank 0 when it has the gradients of rank 1 too. What rank 0 does meanwhile
    # is another matter: it waits for the loss of rank 1, and then the answers may be there.
    lengths_ns = [
        span.interval[1] - span.interval[0]
        for rank in range(2)
        for span in trace.spans[rank]
        if span.kind == EXCHANGE and span.name.startswith("push and pull part")
    ]
    assert max(lengths_ns) > LATE_S / 2 * 1e9


def test_sums_of_slices_and_the_means_beside_them_are_seen_in_groups_of_their_own(
    tmp_path: Path,
) -> None:
    trace, _ = traced(tmp_path, 4, "tensor=2,ddp")
    groups = {span.collective_id: span.ranks for span in trace.spans[0] if span.kind == EXCHANGE}
    assert {(1,), (2,)} <= set(groups.values())
    assert any("Gloo" in name for name in names(trace, EXCHANGE))


def test_a_trace_changes_no_number(tmp_path: Path) -> None:
    calls = [(tmp_path, "ddp", window) for window in (None, "3@0")]
    for (plain, _), (seen, _) in world.run(2, in_turn, run_traced, *calls):
        assert plain == seen
    assert chrome.read(tmp_path).steps == [1, 2, 3]


def test_clocks_of_other_hosts_are_aligned_and_the_error_is_told(tmp_path: Path) -> None:
    for ahead_ns, error_ns in world.run(2, _measured)[:1]:
        assert error_ns < 50e6
        assert abs(ahead_ns - 3_000_000_000) <= error_ns


def _measured() -> tuple[int, int]:
    from shoal.comm.clocks import offsets

    run = shoal.init("ddp", announce=lambda _: None)
    rank = dist.get_rank()
    found = offsets(run.mesh, f"clock {rank}", lambda: time.monotonic_ns() + 3_000_000_000 * rank)
    assert offsets(run.mesh, "one clock")[1] == (0, 0)
    return found[1]


def test_a_run_that_is_killed_while_it_is_traced_leaves_the_trace_before_as_it_was(
    tmp_path: Path,
) -> None:
    traced(tmp_path)
    before = (tmp_path / "trace.json").read_bytes()
    with world.start(2, _dies_in_its_trace, tmp_path) as ranks:
        assert -signal.SIGKILL in ranks.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_bytes() == before


def _dies_in_its_trace(directory: Path) -> None:
    if dist.get_rank() == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run_traced(directory, "ddp", "100@2", "compute", 200)


def test_a_trace_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    found = world.run(2, run_traced, tmp_path / "file")
    assert len(found[0][0]) == 5
    assert "no trace was written" in capfd.readouterr().err


def test_a_group_that_hides_what_ranks_send_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"hides what ranks send.*cpu:shoal"):
        world.run(2, _over_gloo, tmp_path)


def _over_gloo(directory: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    run_traced(directory)
