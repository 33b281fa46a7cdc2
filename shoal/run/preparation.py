"""The steps of `Run.prepare`: its arguments, the loader, the random numbers.

arguments   ──> sort_arguments   ──> models, optimizers and loaders, in any order
models      ──> as_one_module    ──> one module, in which each parameter has one name
loader      ──> shard_loader     ──> this rank's shares of each global batch
torch       ──> seed_this_rank   ──> other random numbers where samples differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh, register_cleanup
from shoal.data.fingerprint import Fingerprint, fingerprint
from shoal.data.loader import shard_batches
from shoal.data.seeds import derive_seed
from shoal.data.sharded_loader import ShardedLoader
from shoal.errors import UsageError
from shoal.strategies.transforms.precision import LossScale
from shoal.trace.recorder import Recorder

_SCRIPTED = (
    "is compiled by torch.jit, whose modules take no hooks. Prepare the model itself, and compile "
    "a copy with run.weights() for export; to train faster: shoal.init(compile=True)."
)


def sort_arguments(
    things: tuple[Any, ...],
) -> tuple[list[nn.Module], list[Optimizer], list[Any]]:
    """Return the models, optimizers and loaders among the arguments of `prepare`.

    None, for a loader that a script lacks, is ignored.

    Raises: UsageError: an argument is of no such kind, with its position.
    """
    if not things:
        raise UsageError("prepare() was given nothing; give it models, optimizers and loaders.")
    models: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    loaders, problems = [], []
    for position, thing in enumerate(things, start=1):
        if thing is None:
            continue
        if isinstance(thing, nn.Module):
            if any(isinstance(module, torch.jit.ScriptModule) for module in thing.modules()):
                problems.append(f"prepare(...): argument {position} {_SCRIPTED}")
            models.append(thing)
        elif isinstance(thing, Optimizer):
            _add_hooks(thing)
            optimizers.append(thing)
        elif is_loader(thing):
            loaders.append(thing)
        else:
            problems.append(
                f"prepare(...): argument {position} is a {type(thing).__name__}; {_cure(thing)}"
            )
    if problems:
        raise UsageError("\n".join(problems))
    return models, optimizers, loaders


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


Draws = Literal["rank", "global"]
"""Random numbers of a step: a stream for each data rank, or those of one device."""


Nonfinite = Literal["skip", "stop", "ignore"]
"""Reaction to a step that is not finite: leave it out, end the run, or take it."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that hold for all of its steps; `shoal.init` explains them."""

    seed: int
    accumulate: int
    draws: Draws = "rank"
    nonfinite: Nonfinite = "skip"
    max_nonfinite: int = 10
    autocast: torch.dtype | None = None
    """Dtype of the forward pass under mixed precision; None without."""
    loss_scale: LossScale | None = None
    """The loss scale of fp16, which gradients carry; None without."""


def shard_loader(
    loader: Any,
    mesh: Mesh,
    seed: int,
    recorder: Recorder | None,
    announce: Callable[[str], None] | None = None,
) -> ShardedLoader:
    """Return a loader of this rank's shares of the global batches of `loader`.

    Args:
        loader: a DataLoader or another iterable of global batches.
        recorder: of a trace, which shows how long batches take to come; None without a trace.
        announce: prints a note.
    """
    sharded = shard_batches(
        loader, mesh.data.rank, mesh.data.size, seed, recorder, announce, mesh.all_gather_str
    )
    sharded.device = mesh.device
    sharded.data_fingerprint = fingerprint(sharded.dataset)
    facts = [sharded.data_fingerprint, fingerprint(getattr(loader, "sampler", None))]
    check_same_data("prepare", sharded.dataset, facts, mesh.data)
    # Its worker processes must end before the process groups do.
    register_cleanup(sharded)
    return sharded


def check_same_data(call: str, dataset: Any, facts: Sequence[Fingerprint], data: Axis) -> None:
    """Raise UsageError on all ranks if fingerprints of data and sampler differ. Collective."""
    if data.is_same(facts):
        return
    raise UsageError(
        f"{call}: {type(dataset).__name__} or its sampler is not the same on all ranks, so "
        "some samples would come twice, and others never. After the first run.prepare torch draws "
        "other numbers on each data rank. Draw parts of the data before it, or by a generator that "
        "is the same on all ranks: random_split(data, lengths, "
        "generator=torch.Generator().manual_seed(fold)). If the samples are the same all the "
        "same, give the data set a method fingerprint() that returns a text."
    )


def seed_this_rank(mesh: Mesh, settings: RunSettings) -> None:
    """Seed torch so that ranks with other samples draw other random numbers.

    Equal dropout masks on all ranks would be one mask for the global batch: a smaller sample. Ranks
    of one tensor or pipeline axis share samples, and what the loop draws for these (noise, a
    permutation) must be equal on the first stage and on the last. Random numbers of Python and
    NumPy stay equal on all ranks, as `shoal.init` has seeded them: loops take decisions by them,
    one for the global batch, and a branch that only some ranks take would stop all.
    """
    # The global stream, which steps draw from, begins with the seed of the first rank.
    apart = (1,) if settings.draws == "global" else ()
    torch.manual_seed(derive_seed(settings.seed, mesh.data.rank, *apart))
