"""Plans as text and as JSON; how many parameter servers, and how often to save."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import ceil, inf
from textwrap import wrap
from typing import Any

from shoal.costs import goodput, server_count
from shoal.costs.cluster import Cluster
from shoal.costs.machine import Machine
from shoal.planner.smallest_change import Command, named_hosts, smallest_changes, start_options
from shoal.planner.strategy_search import (
    FEW_WORDS,
    MANY_SEGMENTS,
    Plan,
    Planner,
    Plans,
    complexity,
)
from shoal.platform.quantity_text import bytes_text, seconds_text
from shoal.strategies import parse_line
from shoal.strategies.options import ServerOptions

WIDTH = 100
KINDS = {"gathered": "gathered weights, messages, buffers", "servers": "its share of the servers"}
ROWS = 12
"""Plans in the table; --json has all."""
PART_BYTES = ServerOptions.part_mb * 2**20
MOST_SERVERS = 4
"""Servers for each worker that are looked at."""
ALIKE = 1.01
"""Steps that differ by less are alike, and then fewer servers are better."""


def report(planner: Planner, plans: Plans, command: Command, more: Sequence[str] = ()) -> str:
    """Return the table of plans, best first, and why others are none.

    Args:
        command: with which the best is run.
        more: lines before that command.
    """
    lines = [*_head(planner), ""]
    shown = _worth_showing(plans.fitting)[:ROWS]
    if shown:
        lines += [*_table(shown), ""]
        if any(after.seconds < before.seconds for before, after in pairwise(shown)):
            lines += _wrapped(
                "in the order of the longest time that a strategy's own error allows: servers are "
                "predicted less well than others",
                "",
            )
    left_out = len(plans.fitting) + len(plans.slower) - len(shown)
    if left_out:
        lines += [
            f"and {left_out} more that are slower, or cost what a simpler one does: --json has all",
            "",
        ]
    inexact = [plan.strategy for plan in shown if not plan.step.is_exact]
    if inexact:
        lines += _wrapped(f"~ not the numbers of one device: {', '.join(inexact)}", "  ")
    if len(planner.workload.model.segments) > MANY_SEGMENTS:
        lines += [f"only lines of up to {FEW_WORDS} words were compared; --strategy plans any", ""]
    lines += [*_why_not(plans), *more]
    lines += _next(planner, plans, command)
    return "\n".join(lines)


def _worth_showing(plans: Sequence[Plan]) -> list[Plan]:
    """Leave out plans that cost what a simpler one costs, and recomputation that is not needed.

    With one data rank, for example, all ways to share out the batch are the same.
    """
    lines = {plan.strategy for plan in plans}
    shown: dict[tuple[float, float], Plan] = {}
    for plan in plans:
        specs = parse_line(plan.strategy).specs
        without = ",".join(str(spec) for spec in specs if spec.name != "recompute")
        if without != ",".join(map(str, specs)) and without.removesuffix(",ddp") in lines:
            continue
        key = (plan.seconds, plan.memory.total)
        if key not in shown or complexity(plan) < complexity(shown[key]):
            shown[key] = plan
    return [*shown.values()]


def _head(planner: Planner) -> Iterator[str]:
    work, cluster = planner.workload, planner.cluster
    flops = work.model.flops(work.global_batch)
    ranks = f"{cluster.ranks:,} rank{'s' if cluster.ranks > 1 else ''}"
    hosts = f"on {len(cluster.hosts)} hosts" if len(cluster.hosts) > 1 else "on one host"
    yield (
        f"{work.model.name}: {work.model.numel:,} parameters, {_flops_text(flops)} a step; "
        f"global batch {work.global_batch}; {ranks} {hosts}"
    )
    memory = f"{bytes_text(planner.memory_limit)} for the tensors of each rank"
    yield from _wrapped(f"{memory}; {machine_text(planner.machine)}", "")


def machine_text(machine: Machine) -> str:
    """Return where the speeds come from."""
    if machine.calibrated:
        return f"speeds measured on {machine.name}: {machine.note}"
    return f"NOT CALIBRATED: speeds {machine.note}"


def _flops_text(flops: float) -> str:
    for unit in ("", "K", "M", "G", "T", "P"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} EFLOP"


def _table(plans: Iterable[Plan]) -> list[str]:
    head = ("strategy", "a step", "", "samples/s", "memory", "bound by", "sent")
    rows = [head]
    for plan in plans:
        assert plan.time is not None
        mark = "" if plan.step.is_exact else " ~"
        rows.append(
            (
                plan.strategy + mark,
                seconds_text(plan.seconds),
                f"±{plan.band:.0%}",
                f"{plan.samples_per_s:,.0f}"
                if plan.samples_per_s >= 10
                else f"{plan.samples_per_s:.2g}",
                bytes_text(plan.memory.total),
                binding(plan),
                bytes_text(plan.step.sent_bytes()),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    left = (0, 5)
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def binding(plan: Plan) -> str:
    """Return what takes most of the time: computing, idle stages, or a message."""
    time = plan.time
    if time is None:
        return "memory"
    share = time.on_path[time.bound_by] / time.seconds if time.seconds else 0.0
    stages = len(plan.step.rows)
    if stages > 1 and time.idle > 1 - share and time.idle > 0.25:
        return f"idle stages {time.idle:.0%}"
    return f"{time.bound_by} {share:.0%}"


def _why_not(plans: Plans) -> list[str]:
    """Return a line for each reason, with the shortest strategy that it holds for.

    Only of one strategy beside ddp: combinations with it fail for the same reason. --json has all.
    """
    reasons: dict[str, str] = {}
    for plan in plans.too_large[:3]:
        reasons[f"does not fit by {bytes_text(plan.missing_bytes)}"] = plan.strategy
    for strategy, reason in sorted(plans.refused.items(), key=lambda item: len(item[0])):
        names = [spec.name for spec in parse_line(strategy).specs]
        if len(names) - ("ddp" in names) <= 1:
            reasons.setdefault(_one_line(reason), strategy.removesuffix(",ddp"))
    if not reasons:
        return []
    lines = ["why not"]
    width = max(map(len, reasons.values()))
    for reason, strategy in reasons.items():
        lines += _wrapped(f"  {strategy:{width}}  {reason}", " " * (width + 4))
    return [*lines, ""]


def _one_line(reason: str) -> str:
    """Return a reason without the head of an error and its details."""
    lines = [line.strip() for line in reason.splitlines()]
    if lines[0].endswith("in the configuration:"):
        lines = lines[1:]
    return lines[0]


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _next(planner: Planner, plans: Plans, command: Command) -> Iterator[str]:
    best = plans.best
    if best is not None:
        if best is not plans.fitting[0]:
            yield f"{best.strategy} is {_advantage(best, plans)}:"
        if best.is_tight:
            yield (
                f"tight: {bytes_text(best.memory.total)} of {bytes_text(best.memory_limit)}, and "
                "predictions of memory may be wrong by more; try it before a long run"
            )
        yield from filter(None, [planner.workload.note])
        yield command.line(planner, best.strategy)
    elif plans.too_large:
        nearest = plans.too_large[0]
        size = bytes_text(nearest.missing_bytes)
        yield f"nothing fits; {nearest.strategy} comes nearest, and lacks {size} on each rank"
        yield from change_lines(planner, command)
    else:
        yield "no strategy runs this job on these ranks"


def _advantage(best: Plan, plans: Plans) -> str:
    """Return why the plan to use is not the one that is predicted to be the fastest."""
    faster = [plan for plan in plans.fitting if plan.latest_s < best.latest_s]
    if any(plan.is_tight for plan in faster) and not best.is_tight:
        return "the fastest with room for what a prediction of memory may be wrong by"
    if faster and not any(plan.step.is_exact for plan in faster):
        return "the fastest with the numbers of one device"
    return "as fast as a prediction can tell, and simpler"


def change_lines(planner: Planner, command: Command) -> Iterator[str]:
    """Yield the smallest changes that make the workload fit."""
    changes = list(smallest_changes(planner, command))
    yield from filter(None, [planner.workload.note])
    yield "the smallest changes that make it fit:" if changes else "no change makes it fit"
    yield from (f"  {change}" for change in changes)


def explain(planner: Planner, plan: Plan, command: Command) -> str:
    """Return one plan in detail: memory by kind, and where the time goes, or what makes it fit."""
    held = plan.memory
    lines = [*_head(planner), "", f"{plan.strategy}", ""]
    lines.append("memory of the fullest rank at its fullest moment")
    for kind in ("parameters", "gradients", "optimizer", "activations", "gathered", "servers"):
        size = getattr(held, kind)
        if kind == "servers" and not size:
            continue
        share = size / held.total if held.total else 0
        name = KINDS.get(kind, kind)
        lines.append(f"  {name:36} {bytes_text(size):>11}  {'█' * round(40 * share)}")
    verdict = "fits"
    if plan.missing_bytes > 0:
        verdict = f"does not fit by {bytes_text(plan.missing_bytes)}"
    lines.append(
        f"  {'all':36} {bytes_text(held.total):>11}  of {bytes_text(plan.memory_limit)}: {verdict}"
    )
    if plan.time is not None:
        lines += ["", *_time_lines(plan)]
    else:
        lines += ["", *change_lines(planner, command)]
    return "\n".join(lines)


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    assert time is not None
    yield (
        f"a step: {seconds_text(time.seconds)} ±{plan.band:.0%}, {plan.samples_per_s:,.1f} "
        f"samples/s; {bytes_text(plan.step.sent_bytes())} sent by each rank"
    )
    for label, seconds in sorted(time.on_path.items(), key=lambda item: -item[1]):
        if seconds > 0.001 * time.seconds:
            share = seconds / time.seconds
            bar = "█" * round(40 * share)
            yield f"  {label:36} {seconds_text(seconds):>11}  {bar}"
    yield f"  {'not computing, mean of the ranks':36} {time.idle:>11.0%}"


def choice_text(planner: Planner, plans: Plans) -> str:
    """Return the sentence of `auto`: the best plan with its reason, or that nothing fits."""
    best, ranks = plans.best, planner.cluster.ranks
    if best is None:
        return f"strategy auto: nothing fits on {ranks} ranks; `shoal plan` says by how much."
    return (
        f"strategy auto: {best.strategy}: {seconds_text(best.seconds)} a step predicted (±"
        f"{best.band:.0%}), {bytes_text(best.memory.total)} on each of {ranks} ranks; "
        f"{machine_text(planner.machine)}"
    )


def as_json(planner: Planner, plans: Plans) -> dict[str, Any]:
    """Return all plans as plain data: seconds, bytes, samples."""
    return {
        "model": planner.workload.model.name,
        "parameters": planner.workload.model.numel,
        "global_batch": planner.workload.global_batch,
        "ranks": planner.cluster.ranks,
        "memory_limit": planner.memory_limit,
        "calibrated": planner.machine.calibrated,
        "machine": planner.machine.name,
        "plans": [plan_json(plan) for plan in (*plans.fitting, *plans.slower, *plans.too_large)],
        "refused": plans.refused,
        "best": plans.best.strategy if plans.best else None,
        "choice": choice_text(planner, plans),
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return one plan as plain data."""
    held = plan.memory
    return {
        "strategy": plan.strategy,
        "fits": plan.missing_bytes <= 0,
        "step_s": plan.time.seconds if plan.time else None,
        "at_least_s": plan.least_s,
        "band": plan.band,
        "samples_per_s": plan.samples_per_s,
        "bound_by": binding(plan),
        "idle": plan.time.idle if plan.time else None,
        "on_critical_path_s": dict(plan.time.on_path) if plan.time else {},
        "sent_bytes": plan.step.sent_bytes(),
        "exact": plan.step.is_exact,
        "memory": {"total": held.total, **asdict(held)},
    }


def servers_lines(planner: Planner, command: Command) -> Iterator[str]:
    """Yield the table of servers for the workers of a plan, by the closed form.

    Args: command: that runs the workload.
    """
    size = sum(float(p.nbytes) for p in planner.workload.model.parameters if p.trainable)
    cluster, workers = planner.cluster, planner.cluster.ranks
    link = cluster.link_of(workers, 1).bandwidth
    worker = link / (cluster.ranks_per_host if len(cluster.hosts) > 1 else 1)
    server_link = link
    if cluster.server_hosts:
        worker, server_link = cluster.server_rates(1)
    server = min(server_link, planner.machine.server_rate)
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
        f"links of {bytes_text(server_link)}/s each way, a worker's share {bytes_text(worker)}/s; "
        f"a server sums and steps {bytes_text(planner.machine.server_rate)}/s"
    )
    if len(cluster.hosts) == 1 and not cluster.server_hosts:
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
        ring = _command(command, start_options(cluster, "ddp"), "ddp")
        yield f"no servers: a ring is as fast, or faster: {ring}"
        return
    count = next(n for n, seconds in step_s.items() if seconds <= ALIKE * fastest_s)
    line = f"server={count}"
    hosts = start_options(cluster, line)
    if not cluster.server_hosts:
        named = named_hosts(cluster.hosts) if len(cluster.hosts) > 1 else "WORKERS"
        hosts = ["--hosts", named, "--server-hosts", "SERVERS"]
    beaten = next(n for n, seconds in step_s.items() if seconds < ring_s)
    servers = f"{count} server" + "s" * (count > 1)
    line = _command(command, hosts, line)
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
