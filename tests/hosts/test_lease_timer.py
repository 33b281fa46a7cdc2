"""The timer of the kernel that kills an agent past its lease, stopped or not."""

import signal
import subprocess
import sys

import pytest

from shoal.launch.hosts.lease import clock_s
from shoal.launch.hosts.lease_timer import AGENT_FIRST_S

LEASE_S = 0.3
PROGRAM = """
import os, signal, sys, time
from shoal.launch.hosts.lease import clock_s
from shoal.launch.hosts.lease_timer import LeaseTimer

timer = LeaseTimer()
timer.set(clock_s() + 60)
if sys.argv[1] == "renewed":
    timer.set(clock_s())
    timer.set(clock_s() + 60)
    time.sleep(0.8)
    print("alive")
else:
    timer.set(clock_s() + float(sys.argv[2]))
    if os.fork() == 0:  # a process of its own, without the timer
        time.sleep(1.2)
        print("alive", flush=True)
        os._exit(0)
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""


def run(kind: str) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, kind, str(LEASE_S)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return found.returncode, found.stdout


@pytest.mark.parametrize("kind", ["running", "stopped"])
def test_a_process_past_its_lease_is_killed_and_not_those_that_it_forked(kind: str):
    begin_s = clock_s()
    assert run(kind) == (-signal.SIGKILL, "alive\n")
    assert clock_s() - begin_s > LEASE_S + AGENT_FIRST_S


def test_a_lease_that_is_renewed_in_time_kills_nobody():
    assert run("renewed") == (0, "alive\n")
