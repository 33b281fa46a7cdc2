"""The smallest changes that make a job fit, as commands: a strategy, micro-batches, more ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.costs.cluster import Cluster, Host
from shoal.costs.memory_peak import peak
from shoal.errors import ConfigError, StrategyRefused
from shoal.planner.find_machine import one_machine
from shoal.planner.strategy_search import Planner, short_lines
from shoal.platform.quantity_text import bytes_text
from shoal.strategies import parse_line

NAMED_HOSTS = 8
"""Hosts that a command names at most."""
MOST_TIMES = 16
"""Times as many ranks that a change may have."""


@dataclass(frozen=True)
class Command:
    """The command that runs a workload.

    Attributes:
        verb, words: what stands before and behind Shoal's own options.
        accumulate: the option for micro-batches.
    """

    verb: Sequence[str] = ("shoal", "launch")
    words: Sequence[str] = ()
    accumulate: str = "--accumulate"

    def line(self, planner: Planner, strategy: str, accumulate: int = 0) -> str:
        """Return the command for a strategy. Args: accumulate: 0 for what the job has itself."""
        options = start_options(planner.cluster, strategy)
        options += [self.accumulate, str(accumulate)] if accumulate else []
        return shlex.join([*self.verb, *options, "--strategy", strategy, *self.words])


def start_options(cluster: Cluster, strategy: str) -> list[str]:
    """Return the options that start the ranks of a cluster: -n, --hosts, or --slurm for many."""
    hosts, ranks = cluster.hosts, cluster.ranks_per_host
    if cluster.server_hosts and any(s.name == "server" for s in parse_line(strategy).specs):
        servers = ",".join(host.name for host in cluster.server_hosts)
        return ["--hosts", named_hosts(hosts), "--server-hosts", servers]
    if len(hosts) == 1:
        return ["-n", str(cluster.ranks)]
    if len(hosts) > NAMED_HOSTS and all(host.ranks == ranks for host in hosts):
        return ["--slurm", "--nodes", str(len(hosts)), "--ntasks-per-node", str(ranks)]
    return ["--hosts", named_hosts(hosts)]


def named_hosts(hosts: Sequence[Host]) -> str:
    """Return the words of `--hosts`."""
    return ",".join(f"{host.name}:{host.ranks}" for host in hosts)


def smallest_changes(planner: Planner, command: Command) -> Iterator[str]:
    """Yield a command for each change that makes the workload fit, and what it needs then.

    The fewest micro-batches on these ranks, then the simplest strategy with more of them, and the
    fewest ranks with as few micro-batches as the job has, else with more. Only strategies that
    compute the numbers of one device.
    """
    own = planner.workload.accumulate
    lines = _simplest_first(planner)
    found = next(_on_ranks(planner, lines), None)
    if found is not None:
        yield _line(planner, command, *found)
        in_parts = next(_on_ranks(planner, lines[:1]), found)
        if in_parts[0] != found[0]:
            yield _line(planner, command, *in_parts)
    ranks = planner.cluster.ranks
    while found is None or found[1] > own:
        ranks *= 2
        if ranks > MOST_TIMES * planner.cluster.ranks or len(planner.cluster.hosts) > 1:
            return
        more = Planner(
            planner.workload,
            planner.machine,
            one_machine(planner.machine, ranks),
            planner.memory_limit,
        )
        few = next(_on_ranks(more, _simplest_first(more), only_own=found is not None), None)
        if few is not None:
            yield _line(more, command, *few)
            return


def _simplest_first(planner: Planner) -> list[str]:
    return sorted(
        short_lines(planner.cluster.ranks),
        key=lambda text: (len(parse_line(text).specs), len(text)),
    )


def _on_ranks(
    planner: Planner, lines: Sequence[str], only_own: bool = False
) -> Iterator[tuple[str, int, float]]:
    """Yield (strategy, accumulate, bytes) of the lines that fit, fewest micro-batches first."""
    accumulate = planner.workload.accumulate
    while accumulate <= planner.workload.global_batch:
        workload = replace(planner.workload, accumulate=accumulate)
        tried = Planner(workload, planner.machine, planner.cluster, planner.memory_limit)
        for text in lines:
            size = _bytes(tried, text)
            if size is not None and size <= planner.memory_limit:
                yield text, accumulate, size
        if only_own:
            return
        accumulate *= 2


def _bytes(planner: Planner, text: str) -> float | None:
    """Return the bytes of a rank; None for a strategy that cannot run or is not exact."""
    try:
        step = planner.step_cost(text)
    except (StrategyRefused, ConfigError):
        return None
    return peak(step).total if step.is_exact else None


def _line(planner: Planner, command: Command, text: str, accumulate: int, size: float) -> str:
    given = 0 if accumulate == planner.workload.accumulate else accumulate
    return f"{command.line(planner, text, given)}    # {bytes_text(size)} a rank"
