"""How many parameter servers, and how often to save, as text for one workload."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from math import ceil, inf

from shoal.costs import goodput, server_count
from shoal.costs.cluster import Cluster
from shoal.planner.plan_report import machine_text
from shoal.planner.smallest_change import Command, start_options
from shoal.planner.strategy_search import Planner
from shoal.platform.quantity_text import bytes_text, seconds_text
from shoal.strategies.options import ServerOptions

MIB = 2**20
PART_BYTES = ServerOptions.part_mb * MIB
MOST_SERVERS = 4
"""Servers for each worker that are looked at."""
ALIKE = 1.01
"""Steps that differ by less are alike, and then fewer servers are better."""


def servers_text(planner: Planner, command: Command) -> str:
    """Return the table of servers for the workers of a plan, by the closed form.

    Args: command: that runs the workload.
    """
    return "\n".join(_servers_lines(planner, command))


def _servers_lines(planner: Planner, command: Command) -> Iterator[str]:
    size = sum(float(p.nbytes) for p in planner.workload.model.parameters if p.trainable)
    cluster, workers = planner.cluster, planner.cluster.ranks
    link = cluster.link_of(workers, 1).bandwidth
    worker = link / (cluster.ranks_per_host if len(cluster.hosts) > 1 else 1)
    server = min(link, planner.machine.server_rate)
    single = planner.plan("ddp")
    compute_s = single.time.on_path.get("compute", 0.0) if single.time is not None else 0.0
    parts = max(1, ceil(size / PART_BYTES))

    def step_s(servers: int, beside_s: float = compute_s) -> float:
        of_each = max(parts / servers, 1.0)
        return server_count.servers_beside(
            size, worker, workers, servers, of_each, beside_s, server
        )

    yield (
        f"{planner.workload.model.name}: {bytes_text(size)} of gradients, workers: {workers}, each "
        f"computes {seconds_text(compute_s)} a step"
    )
    enough = server_count.saturation(workers, worker, server)
    ring_s = server_count.ring_beside(size, link, workers, parts, compute_s)
    few = range(1, min(enough, MOST_SERVERS * workers) + 1)
    yield from _advice(cluster, command, ring_s, {n: step_s(n) for n in few})
    yield ""
    yield (
        f"links of {bytes_text(link)}/s each way, a worker's share {bytes_text(worker)}/s; a "
        f"server sums and steps {bytes_text(planner.machine.server_rate)}/s"
    )
    if len(cluster.hosts) == 1:
        yield "that link lies inside one host: --cluster FILE names those between hosts"
    if not planner.machine.calibrated:
        yield machine_text(planner.machine)
    yield ""
    yield "servers   exchange      a step"
    counts = {1, 2, 3, ceil(workers / 4), ceil(workers / 2), workers, ceil(1.5 * workers), enough}
    for servers in sorted(counts):
        exchange = seconds_text(step_s(servers, 0.0))
        yield f"{servers:7}  {exchange:>9}  {seconds_text(step_s(servers)):>10}"
    exchange_s = server_count.ring_beside(size, link, workers, parts)
    yield f"   ring  {seconds_text(exchange_s):>9}  {seconds_text(ring_s):>10}"
    yield ""
    yield (
        f"the exchange alone gains from up to {enough}: {workers} workers send "
        f"{bytes_text(worker)}/s each, and a server takes {bytes_text(server)}/s"
    )
    hidden = server_count.hidden_from(size, worker, workers, compute_s, server)
    if hidden is None:
        yield "no number of servers hides the exchange: a worker's own share of a link takes longer"
    else:
        yield f"from {hidden} on, computing hides all but the first and last partitions"
    yield (
        "assumed: workers of one pace, links of one speed, each server on a host of its own; "
        "beside workers,"
    )
    yield "servers are never faster than a ring, and need cores: docs/strategies/server.md"


def _advice(
    cluster: Cluster, command: Command, ring_s: float, step_s: Mapping[int, float]
) -> Iterator[str]:
    """Yield the answer: how many servers, with the command to use.

    Args: step_s: seconds of a step, by the number of servers.
    """
    fastest_s = min(step_s.values())
    if cluster.ranks == 1 or ALIKE * fastest_s >= ring_s:
        ring = _command(command, start_options(cluster), "ddp")
        yield f"no servers: a ring is as fast, or faster: {ring}"
        return
    count = next(n for n, seconds in step_s.items() if seconds <= ALIKE * fastest_s)
    named = ",".join(f"{host.name}:{host.ranks}" for host in cluster.hosts)
    hosts = ["--hosts", named if len(cluster.hosts) > 1 else "WORKERS", "--server-hosts", "SERVERS"]
    beaten = next(n for n, seconds in step_s.items() if seconds < ring_s)
    servers = f"{count} server" + "s" * (count > 1)
    line = _command(command, hosts, f"server={count}")
    yield f"{servers}, on hosts of their own (a ring is beaten from {beaten} on): {line}"


def _command(command: Command, ranks: list[str], strategy: str) -> str:
    return shlex.join([*command.verb, *ranks, "--strategy", strategy, *command.words])


def failures_text(
    rank_mtbf_s: float, ranks: int, save_s: float, restart_s: float, step_s: float
) -> str:
    """Return how often to save, and which share of the time trains.

    Args: step_s: of the chosen plan; inf if there is none.
    """
    mtbf_s = rank_mtbf_s / ranks  # of a job that any lost rank stops
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
