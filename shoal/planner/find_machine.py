"""The machine of a plan: a preset, a file, or this one, by its GPUs or its calibration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from shoal.costs import machine as machines
from shoal.costs.cluster import Cluster, Host, Link, one_host
from shoal.costs.machine import Machine
from shoal.errors import ConfigError, did_you_mean

GPU_OF_CHILD = (
    "import torch; gpu = torch.cuda.get_device_properties(0); print(gpu.name, gpu.total_memory)"
)


def find_machine(asked: str, ranks: int) -> Machine:
    """Return the machine that was asked for; else this one: its GPUs where each of the ranks of a
    host has one, as in a run, or its calibration.

    Raises: ConfigError: there is none.
    """
    if not asked and (gpu := _gpu_of_this_machine(ranks)) is not None:
        return gpu
    if asked in machines.PRESETS:
        return machines.PRESETS[asked]
    if asked and not Path(asked).is_file():
        known = did_you_mean(asked, machines.PRESETS)
        raise ConfigError(f"machine {asked}: is neither a preset nor a file; {known}")
    return machines.load(Path(asked)) if asked else cpu_of_this_machine()


def cpu_of_this_machine() -> Machine:
    """Return the calibration of this machine, or a CPU of which nothing is known."""
    path = machines.default_path()
    return machines.load(path) if path.is_file() else machines.UNKNOWN_CPU


def _gpu_of_this_machine(ranks: int) -> Machine | None:
    import torch

    # NVML counts them, and a child reads the name: ranks may be forked from this process, which
    # they cannot once it has started the driver.
    if torch.cuda.device_count() < ranks:
        return None
    found = subprocess.run(
        [sys.executable, "-c", GPU_OF_CHILD], capture_output=True, text=True, check=False
    )
    if found.returncode:
        return None
    name, memory = found.stdout.rsplit(maxsplit=1)
    return gpu_by_name(name, float(memory))


def gpu_by_name(name: str, memory_bytes: float) -> Machine:
    """Return the preset of a GPU with its memory, by the name that its driver gives."""
    words = name.upper().replace("-", " ").split()
    presets = [preset for preset in machines.PRESETS if preset.split("-")[0].upper() in words]
    nearest = min(
        (machines.PRESETS[preset] for preset in presets),
        key=lambda machine: abs(machine.memory_bytes - memory_bytes),
        default=machines.unknown_gpu(name, memory_bytes),
    )
    return replace(nearest, memory_bytes=memory_bytes)


def one_machine(machine: Machine, ranks: int) -> Cluster:
    """Return a cluster of one host. Ranks on a CPU share its memory; each GPU has its own."""
    if machine.device == "cpu":
        return one_host(ranks, machine.memory_bytes)
    inside = Link(machine.link_rate)
    return Cluster((Host("one", ranks, machine.memory_bytes, inside, inside),), {})
