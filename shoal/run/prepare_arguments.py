"""The arguments of `Run.prepare`: models, optimizers and loaders, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import UsageError


@dataclass(frozen=True)
class PrepareArguments:
    """Models, optimizers and loaders that a script has given to `prepare`."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loaders: list[Any]


def sort_arguments(things: tuple[Any, ...]) -> PrepareArguments:
    """Sort the arguments by kind; None, for a loader that a script lacks, is ignored.

    Raises: UsageError: an argument is of no such kind, with its position.
    """
    if not things:
        raise UsageError("prepare() was given nothing; give it models, optimizers and loaders.")
    found = PrepareArguments([], [], [])
    problems = []
    for position, thing in enumerate(things, start=1):
        if thing is None:
            continue
        if isinstance(thing, nn.Module):
            found.models.append(thing)
        elif isinstance(thing, Optimizer):
            found.optimizers.append(thing)
        elif is_loader(thing):
            found.loaders.append(thing)
        else:
            problems.append(
                f"prepare(...): argument {position} is a {type(thing).__name__}; {_cure(thing)}"
            )
    if problems:
        raise UsageError("\n".join(problems))
    return found


def is_loader(thing: Any) -> bool:
    """Return True for an iterable of batches."""
    return isinstance(thing, Iterable) and not isinstance(thing, (str, bytes, dict, Tensor))


def _cure(thing: Any) -> str:
    if isinstance(thing, LRScheduler):
        return "schedulers stay as they are. Leave it out."
    if isinstance(thing, Tensor):
        return "tensors are shared out by run.share(batch). Leave it out."
    if callable(thing):
        return "functions stay as they are: give them to run.forward_backward. Leave it out."
    return "prepare takes models (nn.Module), optimizers (torch.optim.Optimizer) and loaders."
