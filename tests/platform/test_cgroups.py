"""Limits of control groups, as files and as groups of the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.platform import cgroups

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


def test_limits_of_the_containers_around_are_found(tmp_path: Path):
    inner = tmp_path / "groups" / "job" / "step"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner / "memory.max").write_text("1073741824\n")
    (inner.parent / "memory.max").write_text("max\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    assert cgroups.cgroup_limits(tmp_path / "groups", membership) == (1.5, 2**30)


def test_limits_of_the_older_kind_of_container_are_found(tmp_path: Path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("2147483648\n")
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/job\n1:cpu:/\n0::/\n")
    assert cgroups.cgroup_limits(tmp_path, membership) == (None, 2**31)


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path):
    assert cgroups.cgroup_limits(tmp_path, tmp_path / "absent") == (None, None)


@pytest.fixture
def half_a_core_and_one():
    """Make a control group with the time of one and a half cores, and remove it."""
    group = CPU_GROUPS / f"shoal-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("150000")
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    yield group
    group.rmdir()


COUNT = """
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from shoal.platform.cgroups import cgroup_limits, usable_cores
print(cgroup_limits()[0], usable_cores())
"""


def test_a_process_in_a_group_with_a_limit_counts_the_cores_that_it_has(half_a_core_and_one):
    counted = subprocess.run(
        [sys.executable, "-c", COUNT, half_a_core_and_one],
        capture_output=True,
        text=True,
        check=True,
    )
    assert counted.stdout == "1.5 1\n"


def test_cores_are_those_of_the_process_where_nothing_limits_it(monkeypatch):
    monkeypatch.setattr(cgroups, "cgroup_limits", lambda: (None, None))
    assert cgroups.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(cgroups, "cgroup_limits", lambda: (0.25, None))
    assert cgroups.usable_cores() == 1
    monkeypatch.setattr(cgroups, "cgroup_limits", lambda: (10_000.0, None))
    assert cgroups.usable_cores() == len(os.sched_getaffinity(0))
