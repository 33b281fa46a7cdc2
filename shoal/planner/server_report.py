"""How many parameter servers, and how often to save, as text for one workload."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from math import ceil, inf

from shoal.costs import goodput, server_count
from shoal.planner.quantity_text import bytes_text, seconds_text
from shoal.planner.smallest_change import Command
from shoal.planner.strategy_search import Planner
from shoal.strategies.options import ServerOptions

MIB = 2**20
PART_BYTES = ServerOptions.part_mb * MIB


def servers_text(planner: Planner, command: Command, duplex: float = 1.0) -> str:
    """Return the table of servers for the workers of a plan, by the closed form.

    Args:
        command: that runs the workload.
        duplex: share of its links that an exchange in both directions uses.
    """
    return "\n".join(_servers_lines(planner, command, duplex))


def _servers_lines(planner: Planner, command: Command, duplex: float) -> Iterator[str]:
    size = sum(float(p.nbytes) for p in planner.workload.model.parameters if p.trainable)
    workers = planner.cluster.ranks
    server_rate = planner.machine.server_rate
    link = planner.cluster.link_of(workers, 1).bandwidth
    rate = min(link, server_rate)
    single = planner.plan("ddp")
    compute_s = single.time.on_path.get("compute", 0.0) if single.time is not None else 0.0
    parts = max(1, ceil(size / PART_BYTES))
    yield (
        f"{planner.workload.model.name}: {bytes_text(size)} of gradients, {workers} workers that "
        f"compute {seconds_text(compute_s)} a step"
    )
    yield (
        f"links of {bytes_text(link)}/s each way; a server sums and steps "
        f"{bytes_text(server_rate)}/s"
    )
    yield ""
    yield "servers   exchange      a step"
    for servers in _interesting(workers):
        of_each = max(parts / servers, 1.0)
        exchange_s = server_count.servers_beside(size, rate, workers, servers, of_each)
        step_s = server_count.servers_beside(size, rate, workers, servers, of_each, compute_s)
        yield f"{servers:7}  {seconds_text(exchange_s):>9}  {seconds_text(step_s):>10}"
    ring_s = server_count.ring_beside(size, link, workers, parts, compute_s)
    exchange_s = server_count.ring_beside(size, link, workers, parts)
    yield f"   ring  {seconds_text(exchange_s):>9}  {seconds_text(ring_s):>10}"
    yield ""
    saturated = server_count.saturation(workers, link, rate)
    yield f"enough: {saturated}. One server more buys nothing: ceil(m B / min(B, beta))"
    # The same parts, for servers that sum as fast as a link brings gradients.
    beaten = server_count.ring_is_beaten_by(workers, parts, duplex * rate / link)
    if beaten is None:
        yield "a ring is never slower, with up to as many servers as workers: ddp"
    else:
        yield f"a ring is beaten from {beaten} servers on: n > m^2 / (2 eta (m-1)), eta {duplex:g}"
    hidden = server_count.hidden_from(size, rate, workers, compute_s)
    if hidden is None:
        yield "no number of servers hides the exchange: a worker's own link takes longer"
    else:
        yield f"hidden behind computing from {hidden} on: ceil(m M / (B t))"
    yield (
        "assumed: workers of one pace, links of one speed, servers on hosts of their own; beside "
        "workers,"
    )
    yield "servers move what a ring moves, and need cores besides: docs/plan.md"
    count = min(saturated, hidden or saturated)
    options = ["--hosts", "WORKERS", "--server-hosts", "SERVERS", "--strategy", f"server={count}"]
    yield f"so, with two lists of hosts: {shlex.join([*command.verb, *options, *command.words])}"


def _interesting(workers: int) -> list[int]:
    counts = {1, 2, 3, ceil(workers / 4), ceil(workers / 2), workers, ceil(1.5 * workers)}
    return sorted(counts)


def failures_text(
    rank_mtbf_s: float, ranks: int, save_s: float, restart_s: float, step_s: float
) -> str:
    """Return how often to save, and which share of the time trains.

    Args: step_s: of the chosen plan; inf if there is none.
    """
    mtbf_s = goodput.job_mtbf_s(rank_mtbf_s, ranks)
    interval_s = goodput.daly_interval_s(mtbf_s, save_s)
    share = goodput.goodput(mtbf_s, save_s, restart_s, interval_s)
    every = "" if step_s == inf else goodput.daly_steps(mtbf_s, save_s, step_s)
    steps = every and f", every {every:,} steps"
    return (
        f"failures: one in {_hours(mtbf_s)} over {ranks:,} ranks; save every {_hours(interval_s)}"
        f"{steps} (Daly),\nthen {share:.1%} of the time trains: a save takes "
        f"{seconds_text(save_s)}, a restart {seconds_text(restart_s)}"
    )


def _hours(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 172_800 else f"{seconds / 86400:,.1f} days"
