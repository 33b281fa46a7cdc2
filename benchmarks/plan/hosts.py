"""Plans of hosts on limited links beside steps that are taken there. Needs Linux and root.

python -m benchmarks.plan.hosts predict     from machine.json, into hosts.json; commit it, then
python -m benchmarks.plan.hosts measure     on network namespaces with limited links
python -m benchmarks.plan.hosts page        the table of hosts.md

A rank on each host. The plan is told the rate of the links, as a cluster file states it, and what
of it is no payload: the headers of full frames of Ethernet, IP and TCP."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.hosts import namespaces
from benchmarks.hosts.command import environment
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.worker_pool import WorkerPool
from benchmarks.plan.cases import MODELS, PlannedCase
from benchmarks.plan.measure import measured
from benchmarks.plan.predict import MACHINE, workload_of
from benchmarks.report_page import circumstances, fill, table, told, write_result
from shoal.costs.cluster import Cluster, Host, Link
from shoal.costs.machine import load, low_and_spread
from shoal.errors import LaunchError, ShoalError
from shoal.planner.strategy_search import Planner

HERE = Path(__file__).parent
FILE = HERE / "hosts.json"
PORT, LIMIT_S = 29750, 120.0
PAYLOAD = 1448 / 1514
"""Share of a link's bytes that carry a tensor: segments of 1,448 bytes in frames of 1,514."""
HEAD = ["hosts", "Mbit/s", "case", "predicted, ms", "measured", "error", "bound by"]


class HostsCase(NamedTuple):
    """A model, a strategy, hosts with one rank each, and the Mbit/s of each host's link."""

    model: str
    strategy: str
    hosts: int
    rate_mbit: int

    @property
    def label(self) -> str:
        return f"{self.model} `{self.strategy}`, {self.hosts} hosts, {self.rate_mbit} Mbit/s"


TWO_HOSTS = {
    50: ("ddp", "zero1", "local=4", "pipeline=2"),
    200: ("ddp", "zero3", "pipeline=2"),
    800: ("ddp", "zero1"),
}
CASES = (
    *(
        HostsCase(model, line, 2, rate)
        for rate, lines in TWO_HOSTS.items()
        for model in ("mlp", "cnn", "gpt")
        for line in lines
    ),
    *(HostsCase("lstm", line, 2, 200) for line in ("ddp", "zero3", "local=4")),
    *(HostsCase(model, "ddp", 4, 200) for model in MODELS),
    HostsCase("gpt", "zero1", 4, 800),
    HostsCase("gpt", "pipeline=4", 4, 200),
)


def main() -> None:
    {"predict": predict, "measure": measure, "page": page}[sys.argv[1]]()


def predict() -> None:
    machine = load(MACHINE)
    workloads = {name: workload_of(name) for name in MODELS}
    entries = []
    for case in CASES:
        link = Link(case.rate_mbit * 1e6 / 8 * PAYLOAD, 1e-4)
        hosts = (Host(str(n), 1, 2.0**40, link, link) for n in range(case.hosts))
        # All hosts share this machine's cores.
        speeds = replace(machine, compute={1: machine.compute_of(case.hosts)})
        planner = Planner(workloads[case.model], speeds, Cluster(tuple(hosts), {}))
        entry: dict[str, Any] = case._asdict()
        try:
            plan = planner.plan(case.strategy)
        except ShoalError as error:
            entry["refused"] = str(error)
        else:
            assert plan.time is not None
            entry |= {"predicted_s": plan.seconds, "on_path_s": dict(plan.time.on_path)}
        print(entry, flush=True)
        entries.append(entry)
    write_result(FILE, {"cases": entries})


def measure() -> None:
    result = json.loads(FILE.read_text())
    result["circumstances"] = circumstances(("torch", "shoal"))
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    networks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in result["cases"]:
        entry["rounds_s"] = []
        networks[entry["hosts"], entry["rate_mbit"]].append(entry)
    with as_a_program():
        for _ in range(rounds):
            for (hosts, rate), entries in networks.items():
                with namespaces.hosts(hosts, rate):
                    for entry in entries:
                        _measure(entry)
                        print(_case(entry).label, entry["rounds_s"], flush=True)
                write_result(FILE, result)


def _case(entry: dict[str, Any]) -> HostsCase:
    return HostsCase(*(entry[name] for name in HostsCase._fields))


def _measure(entry: dict[str, Any]) -> None:
    """Add the step of the slowest rank, or why there is none: a low one, or the mean where only
    some steps exchange anything.
    """
    case = _case(entry)
    with WorkerPool() as pool:
        ranks = [pool.start(1 + n, _rank, n, case) for n in range(case.hosts)]
        try:
            found = [pool.receive(rank, LIMIT_S) for rank in ranks]
        except LaunchError as error:
            entry["failed"] = str(error)[-500:]
            return
    if isinstance(found[0], str):
        entry["refused"] = found[0]
        return
    steps = [max(times) for times in zip(*(rank["step_s"] for rank in found), strict=True)]
    is_mean = case.strategy.startswith("local")
    entry["rounds_s"].append(mean(steps) if is_mean else low_and_spread(steps)[0])


def _rank(_: Connection, number: int, case: HostsCase) -> Any:
    os.environ.update(environment(number, case.hosts, PORT))
    return measured(PlannedCase(case.model, case.strategy, case.hosts))


def page() -> None:
    result = json.loads(FILE.read_text())
    cases = [entry for entry in result["cases"] if entry.get("rounds_s")]
    errors = [entry["predicted_s"] / min(entry["rounds_s"]) - 1 for entry in cases]
    sizes = sorted(map(abs, errors))
    right, pairs = _order(cases)
    text = (
        f"{len(cases)} cases: {mean(sizes):.1%} off (mean of absolute values), bias "
        f"{mean(errors):+.1%}, nine of ten within {sizes[int(0.9 * (len(sizes) - 1))]:.1%}. Of "
        f"{pairs} pairs of plans of one model on the same hosts whose times differ by more than "
        f"5 %, {right} are predicted in the right order ({right / pairs:.0%})."
    )
    rows = [_row(entry, error) for entry, error in zip(cases, errors, strict=True)]
    left = [
        f"- {_case(entry).label}: {entry.get('refused') or entry.get('failed')}"
        for entry in result["cases"]
        if not entry.get("rounds_s")
    ]
    parts = [text, table(HEAD, rows), "\n".join(left), told(result["circumstances"])]
    fill(HERE / "hosts.md", "\n\n".join(part for part in parts if part))
    print("\n\n".join(parts))


def _row(entry: dict[str, Any], error: float) -> list[str]:
    least = min(entry["rounds_s"])
    on_path = entry["on_path_s"]
    binding = max(on_path, key=on_path.__getitem__)
    return [
        *(str(entry["hosts"]), str(entry["rate_mbit"]), f"{entry['model']} `{entry['strategy']}`"),
        *(f"{entry['predicted_s'] * 1e3:.0f}", f"{least * 1e3:.0f}", f"{error:+.0%}"),
        binding.partition(" ")[0],
    ]


def _order(cases: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count pairs of plans of one model and network that are told apart rightly, and all."""
    right = pairs = 0
    for one, other in combinations(cases, 2):
        if any(one[name] != other[name] for name in ("model", "hosts", "rate_mbit")):
            continue
        ratio = min(one["rounds_s"]) / min(other["rounds_s"])
        if not 1 / 1.05 <= ratio <= 1.05:
            pairs += 1
            right += (one["predicted_s"] > other["predicted_s"]) == (ratio > 1)
    return right, pairs


if __name__ == "__main__":
    main()
