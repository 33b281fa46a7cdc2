"""Limits of the control groups around this process, and the cores that they leave it.

A container or a batch system limits time on the processor rather than the set of cores: a process
with half a core on a machine of 128 is allowed on all of them, for a part of each period.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 2**60  # version 1 writes a huge number for "no limit"


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    Cores to which the process is not bound do not count, and a control group's limit on time counts
    as so many whole cores.
    """
    bound = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit, _ = cgroup_limits()
    return bound if limit is None else max(1, min(bound, int(limit)))


def cgroup_limits(
    root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> tuple[float | None, int | None]:
    """Return the limits (cores, bytes) of the control groups around this process; None for no
    limit.

    The narrowest limit of a group and of those around it counts.
    """
    inner = _groups(membership)
    cores, sizes = [], []
    for group in _ancestors(root, inner.get("", "/")):
        cores += [words for words in [_numbers(group / "cpu.max")] if len(words) == 2]
        sizes += _numbers(group / "memory.max")
    # Version 1, still used on older clusters, has one tree for each resource, and -1 or a huge
    # number means "no limit".
    for group in _ancestors(root / "cpu", inner.get("cpu", "/")):
        quota, period = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")
        cores += [quota + period] if quota and period else []
    for group in _ancestors(root / "memory", inner.get("memory", "/")):
        limits = _numbers(group / "memory.limit_in_bytes")
        sizes += [size for size in limits if size < NO_LIMIT_BYTES]
    return min((quota / period for quota, period in cores), default=None), min(sizes, default=None)


def _groups(membership: Path) -> dict[str, str]:
    """Return this process's group by resource; that of version 2 is under the empty name."""
    groups: dict[str, str] = {}
    for line in _read(membership).splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    return groups


def _ancestors(root: Path, inner: str) -> list[Path]:
    """Return the control group `inner` and its ancestors, up to the root of the tree."""
    group = root / inner.lstrip("/")
    return [path for path in (group, *group.parents) if path.is_relative_to(root)]


def _numbers(path: Path) -> list[int]:
    words = _read(path).split()
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
