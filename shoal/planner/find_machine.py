"""The machine of a plan: a preset, a file, or the calibration of this one."""

from __future__ import annotations

from pathlib import Path

from shoal.costs import machine as machines
from shoal.costs.cluster import Cluster, Host, Link, one_host
from shoal.costs.machine import Machine
from shoal.errors import ConfigError, did_you_mean


def find_machine(asked: str) -> Machine:
    """Return the machine that was asked for, or the calibration of this one.

    Raises: ConfigError: there is none.
    """
    if asked in machines.PRESETS:
        return machines.PRESETS[asked]
    if asked and not Path(asked).is_file():
        known = did_you_mean(asked, machines.PRESETS)
        raise ConfigError([f"machine {asked}: is neither a preset nor a file; {known}"])
    path = Path(asked) if asked else machines.default_path()
    return machines.load(path) if path.is_file() else machines.UNKNOWN_CPU


def one_machine(machine: Machine, ranks: int) -> Cluster:
    """Return a cluster of one host. Ranks on a CPU share its memory; each GPU has its own."""
    if machine.device == "cpu":
        return one_host(ranks, machine.memory_bytes)
    inside = Link(machine.link_rate)
    return Cluster((Host("one", ranks, machine.memory_bytes, inside, inside),), {})
