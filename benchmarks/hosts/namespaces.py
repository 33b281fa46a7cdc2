"""Hosts that share nothing but a switch: network namespaces on one machine, each with a link of so
many Mbit/s.

      host 10.77.0.1 ── eth0 ══ 200 Mbit/s each way ══ port ┐
      host 10.77.0.2 ── eth0 ══ 200 Mbit/s each way ══ port ┤ bridge, in a namespace of its own
      host 10.77.0.3 ── eth0 ══ 200 Mbit/s each way ══ port ┘

A token bucket (`tc ... tbf`) at each end of a link holds what leaves there to its rate. Nothing of
this is seen from the machine's own network. Linux, root and iproute2 are needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import UsageError

NAMES = "shoal-bench-"  # then the program's pid, a dash, and the host's number; 0 is the switch
PLACES = Path("/run/netns")
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
BURST = "128kb"
LATENCY = "50ms"


def address(host: int) -> str:
    """Address of a host; hosts count from 1."""
    return f"10.77.0.{host}"


@contextlib.contextmanager
def hosts(count: int, rate_mbit: int) -> Iterator[None]:
    """Hosts 1 to `count` on one switch; removed at the end, whatever ends it.

    Args: rate_mbit: of every link, in each direction.

    Raises: UsageError: not root, or no iproute2.
    """
    with namespaces():
        switch = add(0)
        run(f"ip -n {switch} link add bridge type bridge")
        run(f"ip -n {switch} link set bridge up")
        for host in range(1, count + 1):
            add(host)
            _connect(host, rate_mbit)
        yield


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Where hosts can be added; those of this program are removed at the end. Raises UsageError."""
    if os.geteuid() != 0:
        raise UsageError(f"user {os.geteuid()} may not make network namespaces. Run this as root.")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise UsageError("there is no `ip` or no `tc` here. Install iproute2; this needs Linux.")
    _remove_orphans()
    try:
        yield
    finally:
        _remove(os.getpid())


def enter(host: int) -> None:
    """Be on this host from now on, and end with the process that this one was forked from.

    Processes of two hosts could still reach each other's memory; SHOAL_HOST says that they are not
    to.

    For a process with one thread: others would stay where they are.
    """
    end_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    with (PLACES / _name(host, os.getppid())).open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of host {host}")
    os.environ["SHOAL_HOST"] = address(host)


def end_with_parent() -> None:
    """Have this process killed when the one dies that it was forked from."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _name(host: int, pid: int | None = None) -> str:
    return f"{NAMES}{os.getpid() if pid is None else pid}-{host}"


def add(host: int) -> str:
    """A host without a link; its namespace."""
    name = _name(host)
    run(f"ip netns add {name}")
    run(f"ip -n {name} link set lo up")
    return name


def _connect(host: int, rate_mbit: int) -> None:
    switch, name, port = _name(0), _name(host), f"port{host}"
    run(f"ip -n {switch} link add {port} type veth peer name eth0 netns {name}")
    run(f"ip -n {switch} link set {port} master bridge up")
    run(f"ip -n {name} addr add {address(host)}/24 dev eth0")
    run(f"ip -n {name} link set eth0 up")
    for where, device in ((name, "eth0"), (switch, port)):
        run(
            f"tc -n {where} qdisc add dev {device} root tbf rate {rate_mbit}mbit burst {BURST} "
            f"latency {LATENCY}"
        )


def _remove_orphans() -> None:
    """Remove the namespaces that a killed program has left behind."""
    for place in PLACES.glob(f"{NAMES}*") if PLACES.exists() else ():
        pid = int(place.name.removeprefix(NAMES).partition("-")[0])
        if not Path(f"/proc/{pid}").exists():
            _remove(pid)


def _remove(pid: int) -> None:
    for place in PLACES.glob(f"{NAMES}{pid}-*"):
        subprocess.run(["ip", "netns", "del", place.name], check=False)


def run(command: str, *words: str) -> None:
    """Run a command of iproute2. Args: words: its last ones, where there are spaces in them.
    Raises UsageError.
    """
    done = subprocess.run([*command.split(), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"`{command}` failed: {done.stderr.strip()}. Network namespaces need Linux, root and "
            "iproute2."
        )
