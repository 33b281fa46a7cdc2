"""Small worlds for tests: a few ranks on this machine, each started in a tenth of a second.

    from shoal.testing import world

    # at the top of a module, so that ranks can import it
    def mean_of_ranks() -> float:
        value = torch.tensor(float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.AVG)
        return value.item()

    assert world.run(3, mean_of_ranks) == [1.0, 1.0, 1.0]

The first world of a process takes seconds more, because its fork server imports torch. The server
ends with the thread that started it, so call this from the main thread."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from shoal.errors import LaunchError
from shoal.launch import preload
from shoal.launch.environment import read
from shoal.launch.failure import Failure, from_exit_code, root_cause
from shoal.launch.ranks import Ranks
from shoal.launch.start import start as start_ranks
from shoal.launch.supervise import Supervision

T = TypeVar("T")
# The fork server imports these, if the caller has: test modules need them, and each rank would take
# seconds to import them.
TOOLS = (
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "matplotlib.figure",
    "shoal.train.loop",
    "shoal.optim.adamw8bit",
)


def run(
    processes: int,
    target: Callable[..., T],
    *args: Any,
    timeout_s: float = 60.0,
    gpus: bool = False,
) -> list[T]:
    """Call `target(*args)` in `processes` ranks, with the default process group (backend "shoal")
    initialised.

    Args:
        processes: the number of ranks, >= 1.
        target: a function at the top of a module that can be imported.
        args: picklable values, tensors included; every rank gets its own copies.
        timeout_s: limit for all ranks together, and for each collective.
        gpus: the ranks see this machine's GPUs, and the group has the backends of a world with
            GPUs. Without it they are on the CPU, whatever the machine has.

    Returns:
        The result of each rank, by rank.

    Raises:
        LaunchError: with the full traceback of the rank that failed first, or with the stacks of
            the ranks that had not finished in time. All ranks have ended by then.
    """
    with start(processes, target, *args, timeout_s=timeout_s, gpus=gpus) as world:
        return world.results()


def start(
    processes: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    gpus: bool = False,
) -> World:
    """Start ranks as `run` does, and return at once. Use the result as a context manager, so that
    no rank remains when a test fails.
    """
    tools = [*preload.TRAINING, *(name for name in TOOLS if name in sys.modules)]
    arguments = (target, args, timeout_s, gpus)
    ranks = start_ranks(
        _in_group,
        arguments,
        processes,
        {},
        "lines",
        preload=tools,
        torch_store=False,
    )
    return World(ranks, timeout_s)


class World:
    """Running ranks, made by `start` and killed at the end of its context.

    Attributes:
        failures: reports of failed ranks, in the order of their arrival; complete after `wait`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._supervision = Supervision(ranks, grace_s=timeout_s)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ranks.kill()

    @property
    def failures(self) -> list[Failure]:
        return self._supervision.failures

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [rank.pid for rank in self._ranks.all]

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self._ranks.all[rank].signal(signal_number)

    def wait(self) -> list[int]:
        """Wait until every rank has ended by itself; a failure does not end the other ranks.

        Returns:
            Exit codes by rank; negative for a signal.

        Raises:
            LaunchError: some ranks had not ended in time.
        """
        self._supervision.ends_siblings = False
        self._wait_for_end()
        return [code for _, code in sorted(self._supervision.codes.items())]

    def results(self) -> list[Any]:
        """Wait for the results of all ranks and return them by rank. Raises LaunchError as
        `run`.
        """
        self._wait_for_end()
        world = len(self.pids)
        values = self._supervision.values
        if self.failures:
            raise LaunchError(root_cause(self.failures).describe(world))
        for rank in set(range(world)) - set(values):  # it called sys.exit
            raise LaunchError(from_exit_code(rank, self._supervision.codes[rank]).describe(world))
        return [pickle.loads(values[rank]) for rank in range(world)]

    def _wait_for_end(self) -> None:
        while self._ranks.alive:
            remaining_s = self._deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise LaunchError(self._hanging_ranks())
            self._supervision.step(remaining_s)

    def _hanging_ranks(self) -> str:
        """Kill all ranks; return the text with the stacks of those that live."""
        hanging = [rank.number for rank in self._ranks.alive]
        stacks = [self._ranks.stacks(rank) for rank in hanging]
        self._ranks.kill()
        names = ", ".join(map(str, hanging))
        noun = "rank" if len(hanging) == 1 else "ranks"
        head = f"{noun} {names} of {len(self.pids)} had not finished after {self._timeout_s:g} s"
        failed = [failure.describe(len(self.pids)) for failure in self.failures]
        return "\n\n".join([head, *failed, *stacks])


def _in_group(target: Callable[..., T], args: tuple[Any, ...], timeout_s: float, gpus: bool) -> T:
    if not gpus:  # a rank would take one, and the group of the CPU could not send from it
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from shoal.comm import mesh

    backend = mesh.GPU_BACKENDS if gpus else "cpu:shoal"
    mesh.join_world(read(os.environ), backend, timedelta(seconds=timeout_s))
    value = target(*args)
    mesh.shutdown()
    return value
