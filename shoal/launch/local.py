"""Several ranks on this machine, from one command, in the foreground."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.launch import preload as preloads
from shoal.launch import rank
from shoal.launch.output import Output
from shoal.launch.start import start
from shoal.launch.supervise import Supervision, caught, stop_arrived


def run(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    processes: int,
    environment: Mapping[str, str] | None = None,
    output: Output = "first",
    preload: Sequence[str] = preloads.TRAINING,
    torch_store: bool = True,
) -> int:
    """Call `target(*args)` in `processes` ranks on this machine and wait for them.

    Main thread only. Every rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment, so `torch.distributed.init_process_group(init_method="env://")`
    works in it. The first failure ends the other ranks, and is printed last and in full. Ctrl-C
    ends all ranks. A SIGTERM to this process is forwarded to them.

    Args:
        target: a function at the top of a module. The module is imported before ranks are forked,
            so its import must neither start threads nor touch CUDA.
        args: plain data.
        processes: the number of ranks.
        environment: further variables for the ranks.
        output: `first` shows what rank 0 prints and drops what others print to stdout; `all` shows
            all of it, in lines that begin with the rank. stderr is always shown.
        preload: modules that are imported once, before ranks are forked, besides torch and the
            module of `target`.
        torch_store: False leaves out torch's store, and MASTER_ADDR and MASTER_PORT with it, where
            the target joins the world by Shoal's mesh alone.

    Returns:
        The exit code of the command: 0; 75 if ranks stopped with 75 ("run me again") and none
        failed; 130 after Ctrl-C; 143 if a SIGTERM ended ranks that did not save; else that of the
        rank that failed first, 128 + n for signal n.

    Raises:
        LaunchError: `processes` is below 1, or the target cannot be sent to the ranks.
    """
    try:
        modules = [*preload, *([] if target.__module__ == "__main__" else [target.__module__])]
        with (
            # First, or a SIGTERM while ranks start would end this process alone.
            caught() as signals,
            start(
                target,
                args,
                processes,
                environment or {},
                output,
                preload=modules,
                torch_store=torch_store,
                is_stopped=lambda: stop_arrived(signals),
            ) as ranks,
        ):
            return Supervision(ranks).run(signals)
    except KeyboardInterrupt:  # before signals are caught
        return rank.EXIT_INTERRUPTED


def run_script(
    path: str,
    argv: list[str],
    processes: int,
    environment: Mapping[str, str] | None = None,
    output: Output = "first",
    module: str | None = None,
) -> int:
    """Run the Python file `path` with the arguments `argv` in each of `processes` ranks.

    The rest is as for `run`.

    Args: module: its name, to run it as `python -m` does; None to run it as a file.

    Raises:
        LaunchError: as for `run`, and where there is no such file.
    """
    preload = preloads.for_script(path)
    target, name = (rank.script, path) if module is None else (rank.module, module)
    return run(target, (name, argv), processes, environment, output, preload)
