"""The code of a rank's process: it prepares the process, calls the target and reports the outcome.

It runs in a process that the fork server has forked, or in a fresh interpreter (see `start`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from shoal.errors import UsageError
from shoal.launch import failure
from shoal.launch.environment import is_place_taken
from shoal.platform.cgroups import usable_cores
from shoal.platform.processes import set_process_name
from shoal.watchdog.progress_writer import own_progress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_RESTART = 75
"""Exit code of a run that was asked to stop and has saved; the same command resumes it.
It is EX_TEMPFAIL of <sysexits.h>.
"""
EXIT_INTERRUPTED = 128 + signal.SIGINT
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Lets a rank write the stacks of its threads for the launcher."""

_retained_groups: list[Any] = []  # see keep_process_groups_alive


@dataclass(frozen=True)
class RankResult:
    """A rank's return value, pickled in the rank and unpickled in the process that started it."""

    rank: int
    value: bytes


def main(
    payload: bytes,
    environment: Mapping[str, str],
    report: Connection,
    stdout: Connection | None,
    stderr: Connection | None,
    progress: tuple[str, str],
    hang_limit_s: float,
) -> None:
    """Prepare the process, call the target, and end as an interpreter would: raise SystemExit.

    Args:
        payload: the pickled target and its arguments. They are unpickled where an error can be
            reported.
        environment: all environment variables of the rank, RANK among them.
        report: the pipe for a Failure or a RankResult.
        stdout: the pipe or terminal for stdout; None drops it.
        stderr: the same for stderr.
        progress: where the memories for progress words and for stacks can be opened.
        hang_limit_s: the launcher's limit after which a rank is late; 0 for none.
    """
    code, rank = 1, int(environment["RANK"])
    failure.attach_launcher(report, rank)
    try:
        end_with_parent()
        set_process_name(f"shoal rank {rank}")
        _redirect_output(stdout, stderr)
        _reset_signal_handlers()
        _configure_process(environment)
        words, stacks = progress
        own_progress().attach(words, rank, hang_limit_s)
        with contextlib.suppress(OSError):
            descriptor = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            faulthandler.register(STACKS_SIGNAL, file=descriptor)
        target, arguments = pickle.loads(payload)
        value = target(*arguments)
        failure.report(RankResult(rank, pickle.dumps(value)))
        code = 0
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as stop:  # the exit code is as the interpreter defines it
        if stop.code is None or isinstance(stop.code, int):
            code = (stop.code or 0) & 0xFF
        else:
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - whatever it is, its cause must reach the user
        sys.stdout.flush()
        failure.report(failure.from_exception(rank, error))
    atexit._run_exitfuncs()  # processes of multiprocessing skip the handlers that scripts register
    if code in (0, EXIT_RESTART):
        _destroy_process_group()
    sys.exit(code)


def script(path: str, arguments: list[str]) -> None:
    """Run the Python file `path` as `python path` would. A target for `start`."""
    _watch_copies()
    run_file(path, arguments)


def run_file(path: str, arguments: list[str]) -> None:
    """Run the Python file `path`, with `sys.argv` and `sys.path[0]` as for `python path`."""
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    runpy.run_path(path, run_name="__main__")


def module(name: str, arguments: list[str]) -> None:
    """Run the module `name` as `python -m name` would. A target for `start`."""
    _watch_copies()
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _watch_copies() -> None:
    """Look in the first step of an optimizer whether the script has joined the other ranks.

    Else each rank trains a copy of its own: an error with --strategy, which nothing has read, and a
    note without it.
    """
    strategy = os.environ.get("SHOAL_STRATEGY")
    if os.environ["WORLD_SIZE"] == "1":
        return
    from torch import distributed
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    rank_pid = os.getpid()

    def check(*_: Any) -> None:
        handle.remove()
        is_server = os.getpid() != rank_pid  # forked, on a host of servers before the script runs
        if is_server or is_place_taken():
            return
        if strategy is not None:
            raise UsageError(
                f"--strategy {strategy}: the script steps an optimizer and has not called "
                "shoal.init(), which uses it; each process would train a copy of its own. Call it "
                "first (docs/start.md), or launch the script without --strategy."
            )
        if os.environ["RANK"] == "0" and not distributed.is_initialized():
            print(
                f"shoal: note: each of {os.environ['WORLD_SIZE']} processes trains a copy of its "
                "own: the script steps an optimizer, and has called neither shoal.init() "
                "(docs/start.md) nor init_process_group().",
                file=sys.stderr,
            )

    handle = register_optimizer_step_pre_hook(check)


def serve_store(listener: socket.socket) -> None:
    """Serve the ranks' rendezvous store until the parent ends.

    It is a process of its own, for a store in a rank would be gone when that rank ends.

    Args:
        listener: already bound, so that no other process can take the port.
    """
    end_with_parent()
    # torch does not export it to type checkers, but documents it here.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The server listens at the listener's address alone. Given no listener it would at all.
    address, port = listener.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    wait([_parent_sentinel()])
    del store


def end_with_parent() -> None:
    """Make this process, and all that it starts, die when the process that asked for it dies.

    A session of its own keeps the terminal's Ctrl-C away from ranks and their data-loader workers:
    the parent decides. The kernel watches the parent's pipe and kills the process group, so neither
    a locked interpreter nor a stopped process delays it.
    """
    os.setsid()
    sentinel = _parent_sentinel()
    # F_SETOWN with a negative id: SIGKILL goes to the process group when the pipe closes.
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([sentinel], timeout=0):  # the parent died before the kernel watched
        os.killpg(0, signal.SIGKILL)


def _parent_sentinel() -> int:
    """Return a file descriptor that can be read once the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent.sentinel


def _redirect_output(stdout: Connection | None, stderr: Connection | None) -> None:
    for descriptor, target in ((1, stdout), (2, stderr)):
        with open(os.devnull, "wb") if target is None else target as opened:
            os.dup2(opened.fileno(), descriptor)
    # The fork server created these two objects, with buffering for its own outputs. The user of a
    # rank wants each line at once, and whole: where PYTHONUNBUFFERED is set, `print` would write
    # the newline by itself, behind the line of another rank.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` prints the stacks of a rank


def _reset_signal_handlers() -> None:
    """Give SIGINT and SIGTERM their usual effect.

    The fork server blocks both, so that it survives them and its ranks can save and stop.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _configure_process(environment: Mapping[str, str]) -> None:
    """Set the environment, the random seed, the threads and the garbage collector of the rank."""
    os.environ.clear()
    os.environ.update(environment)
    # Data-loader workers start as in any script. With the parent's start method each rank would
    # start another fork server.
    multiprocessing.set_start_method(None, force=True)
    import numpy
    import torch

    keep_process_groups_alive()
    refuse_worlds_of_script(environment)
    # Objects that the fork server imported stay for ever. Frozen, no collection visits them, which
    # would also copy their shared pages.
    gc.freeze()
    gc.enable()
    numpy.random.seed()  # all ranks are copies of one server and would draw the same numbers
    threads = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    own_share = max(1, usable_cores() // int(environment["LOCAL_WORLD_SIZE"]))
    torch.set_num_threads(int(threads) if threads.isdigit() else own_share)


def keep_process_groups_alive() -> None:
    """Let `destroy_process_group` keep a reference to each group to the end of the process.

    When a DistributedDataParallel has the last reference, torch (2.11 to 2.13) waits for Gloo's
    threads while it holds the interpreter lock, and one of them may wait for that lock
    (pytorch#56297): the rank never ends. Ranks of a fork server start fast, and on them PyTorch's
    own tutorial stopped in this way in most of its runs.

    A second call changes nothing.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    from shoal.platform.torch_private.c10d import process_groups

    destroy = distributed_c10d.destroy_process_group
    if not distributed.is_available() or hasattr(destroy, "__wrapped__"):
        return

    @functools.wraps(destroy)
    def destroy_and_retain(group: Any = None) -> None:
        _retained_groups.extend(process_groups() if group is None else [group])
        destroy(group)

    distributed_c10d.destroy_process_group = destroy_and_retain
    distributed.destroy_process_group = destroy_and_retain


def _destroy_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # the work is done; peers may have ended before
            distributed.destroy_process_group()


def refuse_worlds_of_script(environment: Mapping[str, str]) -> None:
    """Let `init_process_group` of a rank meet in the launcher's store alone.

    Under the launcher torch makes all ranks clients of a store that exists already (see
    TORCHELASTIC_USE_AGENT_STORE). Nobody would serve another address, and the ranks would wait for
    half an hour. Without torch's store of the launcher it does nothing.

    Args:
        environment: the rank's variables.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch.multiprocessing

    from shoal.platform.torch_private.c10d import replace_rendezvous

    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    rank_pid = os.getpid()

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"the launcher has started the script {environment['WORLD_SIZE']} times, and its ranks "
            f"meet at {address} only. Call init_process_group without init_method, leave "
            "MASTER_ADDR and MASTER_PORT as they are, and start no processes; or start the script "
            "once, with `python`"
        )

    def replaced(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(url: str, **options: Any) -> Iterator[Any]:
            asked = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            is_own = os.getpid() == rank_pid and asked == address and url.startswith("env:")
            return original(url, **options) if is_own else refuse()

        return meet

    for scheme in ("tcp", "env"):
        replace_rendezvous(scheme, replaced)
    # A process that starts as a new interpreter has torch's own handlers again.
    processes: Any = torch.multiprocessing
    processes.spawn = refuse
