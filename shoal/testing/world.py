"""Small worlds for tests: a few ranks on this machine, started in a tenth of a second each.

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

import io
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
from shoal.launch.failure import Failure, from_exit_code, root_cause
from shoal.launch.ranks import Ranks
from shoal.launch.start import start as start_ranks
from shoal.launch.supervise import Supervision

T = TypeVar("T")
STACK_DUMP_S = 1.0  # how long ranks that hang may take to write their stacks
# Preloaded where the caller has imported them: what test modules import, and what takes a rank
# seconds.
TOOLS = (
    *(
        "pytest",
        "hypothesis",
        "torch.distributed.checkpoint",
        "matplotlib.figure",
        "shoal.train.loop",
    ),
    "shoal.optim.adamw8bit",
)


def run(processes: int, target: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Call `target(*args)` in `processes` ranks, with the default process group (backend "shoal")
    initialised.

    Args:
        processes: the number of ranks, >= 1.
        target: a function at the top of a module that can be imported.
        args: anything that can be pickled, tensors too; every rank has its own copies.
        timeout_s: for the whole of it, and for each collective.

    Returns:
        What each rank returned, by rank.

    Raises: LaunchError: with the whole traceback of the rank that failed first, or with the stacks
        of the ranks that had
            not finished in time. All ranks have ended by then.
    """
    with start(processes, target, *args, timeout_s=timeout_s) as world:
        return world.results()


def start(processes: int, target: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> World:
    """As `run`, but returns at once; use it as a context, so that no rank stays when a test
    fails.
    """
    tools = [*preload.TRAINING, *(name for name in TOOLS if name in sys.modules)]
    arguments = (target, args, timeout_s)
    ranks = start_ranks(
        _in_group, arguments, processes, {}, "lines", preload=tools, wants_values=True
    )
    return World(ranks, timeout_s)


class World:
    """Ranks that run. Made by `start`; ends with its context.

    Attributes: failures: those that ranks have reported, in the order of their arrival; complete
        after `wait`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks, self._supervision = ranks, Supervision(ranks, grace_s=timeout_s)
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s

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
        """Process ids, by rank."""
        return [rank.pid for rank in self._ranks.all]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self._ranks.all[rank].signal(number)

    def wait(self) -> list[int]:
        """Wait until every rank has ended by itself; no failure ends the others.

        Returns:
            Exit codes by rank; negative for a signal.

        Raises:
            LaunchError: not all had ended in time.
        """
        self._supervision.ends_siblings = False
        self._until_all_end()
        return [code for _, code in sorted(self._supervision.codes.items())]

    def results(self) -> list[Any]:
        """Wait for what every rank returns; raises as `run` does."""
        self._until_all_end()
        world, values = len(self.pids), self._supervision.values
        if self.failures:
            raise LaunchError(root_cause(self.failures).describe(world))
        for rank in set(range(world)) - set(values):  # it called sys.exit
            raise LaunchError(from_exit_code(rank, self._supervision.codes[rank]).describe(world))
        return [pickle.loads(values[rank]) for rank in range(world)]

    def _until_all_end(self) -> None:
        while self._ranks.alive:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise LaunchError(self._hanging_ranks())
            self._supervision.step(left_s)

    def _hanging_ranks(self) -> str:
        """Has the ranks that live write their stacks, reads them, and kills all."""
        hanging = {rank.number: io.StringIO() for rank in self._ranks.alive}
        for rank in self._ranks.alive:
            for stream in rank.streams:
                stream.sink = hanging[rank.number]
            rank.signal(signal.SIGUSR1)
        until_s = time.monotonic() + STACK_DUMP_S
        while self._ranks.alive and (left_s := until_s - time.monotonic()) > 0:
            self._ranks.watch(left_s)
        self._ranks.kill()
        names, noun = ", ".join(map(str, hanging)), "rank" if len(hanging) == 1 else "ranks"
        head = f"{noun} {names} of {len(self.pids)} had not finished after {self._timeout_s:g} s"
        failed = [failure.describe(len(self.pids)) for failure in self.failures]
        return "\n\n".join([head, *failed, *(text.getvalue() for text in hanging.values())])


def _in_group(target: Callable[..., T], args: tuple[Any, ...], timeout_s: float) -> T:
    from torch import distributed

    from shoal.comm import mesh

    distributed.init_process_group(
        "cpu:shoal", init_method="env://", timeout=timedelta(seconds=timeout_s)
    )
    value = target(*args)
    mesh.shutdown()
    return value
