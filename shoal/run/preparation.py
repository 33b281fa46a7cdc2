"""The steps of `Run.prepare`: the loader, the optimizers, the random numbers.

loader      ──> shard_loader     ──> this rank's shares of each global batch
optimizers  ──> bind_optimizers  ──> are bound to what this rank owns
torch       ──> seed_this_rank   ──> other random numbers where samples differ
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh, register_cleanup
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import shard_batches
from shoal.data.seeds import derive_seed
from shoal.data.sharded_loader import ShardedLoader
from shoal.errors import UsageError
from shoal.run import optimizer_binding
from shoal.run.batch_size import is_same_on_all
from shoal.run.checks import check_one_optimizer, check_takes_scaled
from shoal.run.nonfinite_steps import Nonfinite
from shoal.run.optimizer_binding import check_keeps_no_tensors
from shoal.run.optimizer_groups import owned_by
from shoal.strategies import base
from shoal.strategies.transforms.precision import LossScale
from shoal.trace.recorder import Recorder

Draws = Literal["rank", "global"]
"""Random numbers of a step: a stream for each data rank, or those of one device."""


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
    sharded.announce = announce
    sharded.device = mesh.device
    sharded.data_fingerprint = fingerprint(sharded.dataset)
    _check_same_data(sharded, getattr(loader, "sampler", None), mesh.data)
    # Its worker processes must end before the process groups do.
    register_cleanup(sharded)
    return sharded


def _check_same_data(loader: ShardedLoader, sampler: Any, data: Axis) -> None:
    """Raise UsageError on all ranks if their data sets differ, as far as is known. Collective."""
    found = json.dumps([loader.data_fingerprint, fingerprint(sampler)])
    if data.size == 1 or is_same_on_all(sha256(found.encode()).digest(), data):
        return
    raise UsageError(
        f"prepare: {type(loader.dataset).__name__} or its sampler is not the same on all ranks, so "
        "some samples would come twice, and others never. After the first run.prepare torch draws "
        "other numbers on each data rank. Draw parts of the data before it, or by a generator that "
        "is the same on all ranks: random_split(data, lengths, "
        "generator=torch.Generator().manual_seed(fold)). If the samples are the same all the "
        "same, give the data set a method fingerprint() that returns a text."
    )


def bind_optimizers(
    optimizers: Sequence[Optimizer],
    groups: Sequence[list[list[str]]],
    root: nn.Module,
    local_model: base.LocalModel,
    loss_scale: LossScale | None,
) -> None:
    """Point the optimizers at what this rank owns, or hand that to parameter servers. Collective.

    Args:
        groups: for each optimizer, for each of its groups, the names of its parameters.
        root: the models as scripts see them.
        loss_scale: of fp16, which gradients carry; None without it.

    Raises: StrategyRefused: an optimizer or the loss scale does not go with the strategy.
    """
    owned = local_model.trainable_params
    absent = {
        name: parameter
        for name, parameter in root.named_parameters()
        if local_model.is_partial and parameter.requires_grad
    }
    for optimizer, names in zip(optimizers, groups, strict=True):
        mine = owned_by(names, owned)
        check_keeps_no_tensors(optimizer, names, mine)  # a trial of such a one would mislead
        if local_model.is_partial:
            optimizer_binding.check_steps_stages(optimizer)
        optimizer_binding.check_steps_shards(optimizer, mine)
        optimizer_binding.bind_optimizer(optimizer, names, mine, absent)
    if loss_scale is not None:
        check_takes_scaled(local_model)
    if local_model.remote_optimizer is not None:
        check_one_optimizer(optimizers)
        local_model.remote_optimizer.attach(optimizers[0])


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
