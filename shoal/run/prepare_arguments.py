"""The arguments of `Run.prepare`: models, optimizers and loaders, in any order.

Several models become one module, in which each parameter has one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import UsageError

_SCRIPTED = (
    "is compiled by torch.jit, whose modules take no hooks. Prepare the model itself, and compile "
    "a copy with run.weights() for export; to train faster: shoal.init(compile=True)."
)


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
            if any(isinstance(module, torch.jit.ScriptModule) for module in thing.modules()):
                problems.append(f"prepare(...): argument {position} {_SCRIPTED}")
            found.models.append(thing)
        elif isinstance(thing, Optimizer):
            _add_hooks(thing)
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


def _add_hooks(optimizer: Optimizer) -> None:
    """Give an optimizer the hooks that `Optimizer.__init__` makes.

    A class that wraps another optimizer, such as many a Lookahead, often does not call it. torch
    does the same for optimizers that were pickled by a version without hooks.
    """
    vars(optimizer).setdefault("defaults", {})
    Optimizer.__setstate__(optimizer, {})


def is_loader(thing: Any) -> bool:
    """Return True for an iterable of batches."""
    return isinstance(thing, Iterable) and not isinstance(thing, (str, bytes, dict, Tensor))


def _cure(thing: Any) -> str:
    if isinstance(thing, LRScheduler):
        return (
            "schedulers stay as they are. Leave it out; run.checkpoint(directory, "
            "scheduler=scheduler) saves its state."
        )
    if isinstance(thing, Tensor):
        return "tensors are shared out by run.share(batch). Leave it out."
    if callable(thing):
        return "functions stay as they are: give them to run.forward_backward. Leave it out."
    return "prepare takes models (nn.Module), optimizers (torch.optim.Optimizer) and loaders."


class ModelGroup(nn.Module):
    """Several models that are trained together: `model0`, `model1`, ... in the order of `prepare`.

    It is never called, and has no forward function: the user's function calls the models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, model in enumerate(models):
            self.add_module(f"model{index}", model)


def as_one_module(models: Sequence[nn.Module]) -> nn.Module:
    """Return the only model, or a group of several."""
    return models[0] if len(models) == 1 else ModelGroup(models)


def named_models(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the models by the prefix of their parameters' names in `as_one_module`."""
    if len(models) == 1:
        return {"": models[0]}
    return {f"model{index}.": model for index, model in enumerate(models)}


def is_trained(model: nn.Module) -> bool:
    """Return True if a parameter of the model requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def trained_names(root: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {name for name, parameter in root.named_parameters() if parameter.requires_grad}
