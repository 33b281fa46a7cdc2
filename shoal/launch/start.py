"""How ranks are started on this machine.

Where fork is safe (Linux), they are forked from a server process that has imported torch once and
has one thread; elsewhere each is a fresh interpreter. Their rendezvous store listens on a loopback
port that is bound before anyone is told its number, so no two runs can take the same one.

    this process -- fork server -+- store
                                 +- rank 0 (a session of its own) -- its data-loader workers
                                 +- rank 1 ...
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Literal

from shoal.errors import LaunchError
from shoal.launch import preload as preloads
from shoal.launch import rank as inside
from shoal.launch.output import LineForwarder, Output, output_mode
from shoal.launch.ranks import Rank, Ranks

Context = ForkServerContext | SpawnContext


def start(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    processes: int,
    environment: Mapping[str, str],
    output: Output,
    *,
    preload: Iterable[str] = (),
    wants_values: bool = False,
) -> Ranks:
    """Start `processes` ranks that call `target(*arguments)` each.

    Args: target: a function of a module that can be imported; it goes to the ranks by name.
        environment: added to this process's own; the launcher's variables (see environment.py) are
        set on top. output: see output.py. preload: modules that the fork server imports besides
        torch, if this call is the one that starts it. wants_values: whether `Ranks.watch` reports
        what the targets return.

    Raises: LaunchError: no such number of processes, a target or an argument that cannot be sent,
        or a fork server that
            ended because of what it imported.
    """
    if processes < 1:
        raise LaunchError(f"{processes} processes were asked for; there must be at least 1.")
    payload = _pickled(target, arguments)
    context = _context((*preloads.ALWAYS, *preload))
    try:
        ranks, variables = _start_store(context)
    except (EOFError, ConnectionError) as error:
        raise LaunchError(
            "The process that ranks are forked from has ended; its message stands above."
        ) from error
    try:
        for number in range(processes):
            own = {**_inherited(), **environment, **variables, **_place(number, processes)}
            ranks.all.append(
                _start_rank(context, number, processes, payload, own, output, wants_values)
            )
    except BaseException:
        ranks.kill()
        raise
    return ranks


def _pickled(target: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((target, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{target!r} and its arguments cannot be sent to the ranks: {error}. "
            "The target must be a function at the top of a module, its arguments plain data."
        ) from error


def _context(preload: Sequence[str]) -> Context:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # first, because it unblocks the signals that are blocked next
    resource_tracker.ensure_running()
    # The server must outlive a Ctrl-C or a SIGTERM to the whole process group until the ranks have
    # saved and stopped.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, inside.STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start_store(context: Context) -> tuple[Ranks, dict[str, str]]:
    """Start the store's process; returns it, and the variables that lead to it."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        host, port = listener.getsockname()
        process = context.Process(target=inside.keep_store, args=(listener, port), name="store")
        process.start()
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    # Tells every rank's `init_method="env://"` that the store is there already, rank 0's too
    # (torch's rendezvous.py).
    return Ranks(process), variables | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _inherited() -> dict[str, str]:
    """This process's variables, and Gloo on the loopback interface, where the host's name may
    lead elsewhere.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
    }
    return {"GLOO_SOCKET_IFNAME": loopback} | outer


def _place(number: int, processes: int) -> dict[str, str]:
    rank, world = str(number), str(processes)
    return {
        "SHOAL_LAUNCHER": "local",
        "SHOAL_EXPECTED_WORLD": world,
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
    }


def _start_rank(
    context: Context,
    number: int,
    world: int,
    payload: bytes,
    environment: Mapping[str, str],
    output: Output,
    wants_value: bool,
) -> Rank:
    report, said = context.Pipe(duplex=False)
    stdout, lines_out = _stream(context, output, number, "stdout")
    stderr, lines_err = _stream(context, output, number, "stderr")
    orders = inside.RankSpec(number, world, payload, environment, said, stdout, stderr, wants_value)
    process = context.Process(target=inside.main, args=(orders,), name=f"rank {number}")
    process.start()
    for end in (said, stdout, stderr):
        if end is not None:
            end.close()
    return Rank(
        number, process, report, [lines for lines in (lines_out, lines_err) if lines is not None]
    )


def _stream(
    context: Context, output: Output, number: int, name: Literal["stdout", "stderr"]
) -> tuple[Connection | None, LineForwarder | None]:
    """The end that the rank writes to, and the reader of its lines."""
    match output_mode(output, number, name):
        case "through":
            return Connection(os.dup(1 if name == "stdout" else 2), readable=False), None
        case "dropped":
            return None, None
        case "lines":
            source, end = context.Pipe(duplex=False)
            return end, LineForwarder(source, number, getattr(sys, name))
