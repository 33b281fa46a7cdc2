"""The interface of a candidate to the driver, and the work that all candidates do.

    one round:
    gradients[0] --push--> ┌ server 0: first share  ┐ --pull--> worker 0 holds the sum
    gradients[1] --push--> └ server 1: second share ┘ --pull--> worker 1 holds the sum

An echo bounds what a server can do: it sends each worker its own gradient back, sums nothing and
waits for nobody."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

CHECKED_FLOATS = 1 << 20  # compared at a time, so that a check needs little memory


class Missing(Exception):
    """This candidate cannot take part; the message says why. Raised on import or by
    `Candidate()`.
    """


class WrongResult(Exception):
    """A worker does not hold what it should after a round: the candidate's figures would mean
    nothing.
    """


class Candidate(Protocol):
    """One way to push and pull. Every module in `candidates/` defines a class of this name with
    these methods.
    """

    def __init__(self, workers: int, servers: int) -> None:
        """Start that many processes of each role; return when all of them are connected.

        Raises:
            Missing: it is not installed, or has nothing to do with so few workers.
        """

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        """Let worker i push gradients[i] (float32, one dimension, in shared memory) from now on.
        Not timed.
        """

    def check(self) -> None:
        """Do one round and compare what every worker holds with the sum over the workers. Not
        timed.

        Raises:
            WrongResult: some number is another one.
        """

    def run_rounds(self, rounds: int) -> float:
        """Do that many rounds without a pause. Return the seconds from the first worker's start
        to the last worker's end.
        """

    def close(self) -> None:
        """End every process."""


def gradient(worker: int, floats: int) -> Tensor:
    """Return a worker's gradient: small integers, so every order of summing gives the same sum.

    Returns:
        (worker + 1) * (0, 1, ... 999, 0, 1, ...), float32, in shared memory.
    """
    values = torch.empty(floats).share_memory_()
    values.copy_(torch.arange(1000.0).repeat(-(-floats // 1000))[:floats])
    return values.mul_(worker + 1)


def sum_factor(worker: int, workers: int) -> Fraction:
    """The sum of all workers' gradients is this many times what `worker` pushes."""
    return Fraction(workers * (workers + 1) // 2, worker + 1)


def shares(total: int, count: int) -> list[slice]:
    """`total` cut into `count` runs that differ by at most one in length."""
    bounds = [total * index // count for index in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def compare(who: str, held: Sequence[Tensor], pushed: Tensor, factor: Fraction) -> None:
    """Raise WrongResult unless the concatenation of `held` is `factor * pushed`, exactly."""
    begin = 0
    for run in held:
        for piece in run.split(CHECKED_FLOATS):
            expected = pushed[begin : begin + len(piece)] * factor.numerator / factor.denominator
            if not torch.equal(piece, expected):
                raise WrongResult(
                    f"{who} holds {piece[:3].tolist()}... at {begin}, not "
                    f"{expected[:3].tolist()}..."
                )
            begin += len(piece)
    if begin != len(pushed):
        raise WrongResult(f"{who} holds {begin} numbers, not {len(pushed)}")
