"""What runs inside a rank that was started on this machine, before, around and after the user's
function.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shoal.launch import failure
from shoal.launch.process_group_workaround import keep_process_groups_alive

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_RESTART = 75
"""Exit status of a run that was told to stop and has saved; the same command goes on.
EX_TEMPFAIL in <sysexits.h>.
"""
EXIT_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class RankResult:
    """A rank's return value, pickled in the rank and unpickled in the process that started it."""

    rank: int
    value: bytes


@dataclass(frozen=True)
class RankSpec:
    """All that a new rank is told.

    Args:
        payload: the pickled target and its arguments; unpickled where an error can be reported.
        environment: the rank's whole environment.
        report: where a Failure or Returned is sent.
        stdout, stderr: pipes or terminals to write to; None drops what is written.
        wants_value: whether the target's value is sent back.
    """

    rank: int
    world: int
    payload: bytes
    environment: Mapping[str, str]
    report: Connection
    stdout: Connection | None
    stderr: Connection | None
    returns_value: bool


def main(orders: RankSpec) -> None:
    """Run the target and end as an interpreter would; always raises SystemExit."""
    code = _outcome(orders)
    atexit._run_exitfuncs()  # processes of multiprocessing skip the handlers that scripts register
    if code in (0, EXIT_RESTART):
        _leave_group()
    sys.exit(code)


def _outcome(orders: RankSpec) -> int:
    try:
        _end_with_parent()
        _write_to(orders.stdout, orders.stderr)
        _install_signal_handlers()
        _configure_process(orders)
        target, arguments = pickle.loads(orders.payload)
        value = target(*arguments)
        if orders.returns_value:
            orders.report.send(RankResult(orders.rank, pickle.dumps(value)))
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - whatever it is, its cause must reach the user
        sys.stdout.flush()
        orders.report.send(failure.from_exception(orders.rank, error))
        return 1


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def script(path: str, arguments: list[str]) -> None:
    """A target: the Python file `path`, with `sys.argv` and `sys.path[0]` as `python path`
    would have them.
    """
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    runpy.run_path(path, run_name="__main__")


def keep_store(listener: socket.socket, port: int) -> None:
    """Hold the ranks' rendezvous store in a process of its own, so that no rank takes it away
    when it ends.
    """
    _end_with_parent()
    # it is documented there all the same
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    wait([_parent_sentinel()])
    del store


def _end_with_parent() -> None:
    """Make this process and all that it will start die when the process dies that asked for it.

    A session of its own keeps the terminal's Ctrl-C away from ranks and their data-loader workers:
    the parent decides. The kernel itself watches the parent's pipe and kills the whole process
    group, so neither a held interpreter lock nor a stopped process delays it."""
    os.setsid()
    sentinel = _parent_sentinel()
    if sys.platform == "linux":
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([sentinel], timeout=0):  # it died before the kernel was told
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_kill_group_after, args=(sentinel,), daemon=True).start()


def _kill_group_after(sentinel: int) -> None:
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _parent_sentinel() -> int:
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent.sentinel


def _write_to(stdout: Connection | None, stderr: Connection | None) -> None:
    for descriptor, target in ((1, stdout), (2, stderr)):
        with open(os.devnull, "wb") if target is None else target as opened:
            os.dup2(opened.fileno(), descriptor)
    # The server made these objects for its own outputs; a line is worth more now than after the
    # buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` shows where a rank is


def _install_signal_handlers() -> None:
    """Undo what the server was started with: it blocks these two, so that its ranks may still
    save and stop.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _configure_process(orders: RankSpec) -> None:
    os.environ.clear()
    os.environ.update(orders.environment)
    # Data-loader workers start as in any script; a process from a fork server would give each rank
    # another server.
    multiprocessing.set_start_method(None, force=True)
    import numpy
    import torch

    keep_process_groups_alive()
    # what the server imported stays: collections need not go through it, nor copy its pages by
    # doing so
    gc.freeze()
    gc.enable()
    numpy.random.seed()  # all ranks are copies of one server and would draw the same numbers
    threads = orders.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    torch.set_num_threads(int(threads) if threads.isdigit() else max(1, _cores() // orders.world))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # the work is done; peers may have ended before
            distributed.destroy_process_group()
