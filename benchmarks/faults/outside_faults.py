"""Faults that come from outside of the ranks: to the command, to cables, to whole hosts.

Each is called with the FaultyRun once a rank has come to the step of the fault, and waits there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.faults.faulty_run import FaultyRun

SHORT_S, LONG_S = 1.0, 12.0
"""Less than half a lease, and more than a host may be silent."""
STOPPED_S = 5.0
"""More than the limit of a hang."""
SLOW_LINK = "rate 2mbit burst 16kb latency 400ms"


def signal_command(number: int) -> Callable[[FaultyRun], None]:
    def act(run: FaultyRun) -> None:
        os.kill(run.command_pid(), number)
        run.acted()

    return act


def stop_command(duration_s: float) -> Callable[[FaultyRun], None]:
    def act(run: FaultyRun) -> None:
        stop([run.command_pid()], run, duration_s)

    return act


def stop_everything(run: FaultyRun) -> None:
    """Stop all processes of all hosts, as a hypervisor does, and let them continue."""
    stop(run.pids(), run, STOPPED_S)


def stop(pids: Sequence[int], run: FaultyRun, duration_s: float) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    run.acted()
    time.sleep(duration_s)
    for pid in [*pids, run.process.pid]:  # nsenter stops with the command
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut(hosts: Sequence[int], duration_s: float) -> Callable[[FaultyRun], None]:
    """Take the cables of hosts out of the switch for a time; 0 is the desk, -1 one by chance."""

    def act(run: FaultyRun) -> None:
        found = [run.place.hosts[number if number >= 0 else run.chosen] for number in hosts]
        for host in found:
            run.place.cut(host)
        run.acted()
        time.sleep(duration_s)
        for host in found:
            run.place.heal(host)

    return act


def silence_one_direction(run: FaultyRun) -> None:
    """Lose all that a node sends to the desk; what the desk sends arrives."""
    routes = [(run.place.hosts[run.chosen], run.place.desk.address)]
    _change_routes(run, "add", routes)
    run.acted()
    time.sleep(LONG_S)
    _change_routes(run, "del", routes)


def _change_routes(run: FaultyRun, change: str, routes: Sequence[tuple[Any, str]]) -> None:
    for host, address in routes:
        _in_network(host, f"ip route {change} blackhole {address}")


def slow_link(run: FaultyRun) -> None:
    host = run.place.hosts[run.chosen]
    _in_network(host, f"tc qdisc add dev eth0 root tbf {SLOW_LINK}")
    run.acted()
    time.sleep(STOPPED_S)
    _in_network(host, "tc qdisc del dev eth0 root")


def _in_network(host: Any, command: str) -> None:
    subprocess.run([*host.enter("--net"), *command.split()], check=True)


def reboot(hosts: Sequence[int]) -> Callable[[FaultyRun], None]:
    """End all that runs on hosts, without a word from them, and empty their memory."""

    def act(run: FaultyRun) -> None:
        found = [run.place.hosts[number if number >= 0 else run.chosen] for number in hosts]
        for host in found:
            run.place.cut(host)
        for host in found:
            for pid in host.pids() - host.first_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run([*host.enter(), "sh", "-c", "rm -rf /dev/shm/* /tmp/shoal*"], check=True)
        run.acted()
        for host in found:
            run.place.heal(host)

    return act


def kill_ssh_client(run: FaultyRun) -> None:
    own = next(pid for pid in run.place.desk.pids() if _is_client(pid, run.place, run.chosen))
    os.kill(own, signal.SIGKILL)
    run.acted()


def _is_client(pid: int, place: Any, number: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
        return words[0].endswith("ssh") and place.hosts[number].name in words
    return False


OUTSIDE_FAULTS: dict[str, Callable[[Any], None]] = {
    "command killed, given again": signal_command(signal.SIGKILL),
    "SIGTERM to the command, given again": signal_command(signal.SIGTERM),
    "Ctrl-C, given again": signal_command(signal.SIGINT),
    "command stopped for 1 s": stop_command(SHORT_S),
    "command stopped for 5 s": stop_command(STOPPED_S),
    "command stopped for 12 s": stop_command(LONG_S),
    "everything stopped for 5 s": stop_everything,
    "ssh client killed": kill_ssh_client,
    "host cut off for 1 s": cut([-1], SHORT_S),
    "host cut off for 12 s": cut([-1], LONG_S),
    "two hosts cut off for 12 s": cut([2, 3], LONG_S),
    "first host cut off for 12 s": cut([1], LONG_S),
    "command's machine cut off for 1 s": cut([0], SHORT_S),
    "command's machine cut off for 12 s": cut([0], LONG_S),
    "host unheard for 12 s": silence_one_direction,
    "link of 2 Mbit/s for 5 s": slow_link,
    "host starts again": reboot([-1]),
    "first host starts again": reboot([1]),
    "all hosts start again": reboot([1, 2, 3]),
}
EXIT_CODES = {
    "command killed, given again": -signal.SIGKILL,
    "SIGTERM to the command, given again": 75,
    "Ctrl-C, given again": 130,
}
"""Exit codes of commands that end by the fault."""
