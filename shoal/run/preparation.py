"""The parts of `Run.prepare`: the loader, the local model, the optimizer, the random numbers.

loader     ──> shard_loader     ──> this rank's shares of each global batch
model      ──> make_local_model ──> this rank's piece, after all strategies
optimizer  ──> make_step        ──> is bound to what this rank owns
torch      ──> seed_this_rank   ──> other random numbers where samples or layers differ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh, register_cleanup
from shoal.data.seeds import derive_seed
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.sharding import shard_batches
from shoal.data.tree_map import in_dtype, tree_map
from shoal.run import optimizer_binding, startup_summary
from shoal.run.batch_size import BatchSizes
from shoal.run.checks import check_not_scaled, check_settings_for_servers
from shoal.run.loss_scaling import LossScaleGuard
from shoal.run.optimizer_in_backward import OptimizerInBackward
from shoal.run.tracing import Tracing
from shoal.run.training_step import TrainingStep
from shoal.strategies import base
from shoal.strategies.single import single_device
from shoal.strategies.transforms.precision import LossScale
from shoal.trace.recorder import Recorder

MAX_EXAMPLES = 8
"""Samples of the example batch, with which a model is traced and measured."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that hold for all of its steps; `shoal.init` explains them."""

    seed: int
    accumulate: int
    step_in_backward: bool = False


def shard_loader(
    loader: Any,
    mesh: Mesh,
    seed: int,
    recorder: Recorder | None,
    announce: Callable[[str], None] | None = None,
) -> ShardedLoader | None:
    """Return a loader of this rank's shares of the global batches of `loader`.

    Args:
        loader: a DataLoader or another iterable of global batches.
        recorder: of a trace, which shows how long batches take to come; None without a trace.
        announce: prints a note.
    """
    if loader is None:
        return None
    sharded = shard_batches(
        loader, mesh.data.rank, mesh.data.size, seed, recorder, announce, mesh.all_gather_str
    )
    # Its worker processes must end before the process groups do.
    register_cleanup(sharded)
    return sharded


def make_local_model(
    model: nn.Module,
    loader: ShardedLoader | None,
    mesh: Mesh,
    strategies: Sequence[base.Strategy],
    accumulate: int,
    announce: Callable[[str], None],
) -> base.LocalModel:
    """Apply all strategies to the model, and announce the startup summary. Collective."""
    for line in startup_summary.lines(model, loader, mesh, accumulate, strategies):
        announce(line)
    example = None
    if loader is not None and any(strategy.needs_example_batch for strategy in strategies):
        example = _example_batch(model, loader, mesh, accumulate)
    local_model = base.apply_strategies(single_device(model, example), strategies, mesh)
    for line in local_model.summary_lines:
        announce(line)
    return local_model


def _example_batch(
    model: nn.Module, loader: ShardedLoader, mesh: Mesh, accumulate: int
) -> base.ExampleBatch | None:
    """Return inputs as the model will get them: the loader's items without the last, the target."""
    # Rounded up: the largest micro-batch that any rank computes.
    num_samples = -(-(loader.batch_size or MAX_EXAMPLES) // (mesh.data.size * accumulate))
    batch = _on_device(loader.first(min(num_samples, MAX_EXAMPLES)), mesh.device)
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if floating:
        # The model may be float64 where the data set is float32.
        batch = in_dtype(batch, floating[0])
    if not isinstance(batch, (tuple, list)):
        return None
    return base.ExampleBatch(tuple(batch[:-1]), num_samples)


def _on_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return tree_map(batch, lambda item: _on_device(item, device))


def _bind_optimizer(
    optimizer: Optimizer,
    groups: list[list[str]],
    local_model: base.LocalModel,
    settings: RunSettings,
    scaled: bool,
) -> None:
    """Point `optimizer` at what this rank owns, or hand that to parameter servers. Collective."""
    optimizer_binding.check_steps_shards(optimizer, local_model.trainable_params)
    optimizer_binding.bind_optimizer(optimizer, groups, local_model.trainable_params)
    if local_model.strategy_state.in_gradient_units:
        check_not_scaled(scaled)
    if local_model.remote_optimizer is not None:
        check_settings_for_servers(scaled, settings.step_in_backward)
        local_model.remote_optimizer.attach(optimizer)


def make_step(
    local_model: base.LocalModel,
    optimizer: Optimizer,
    groups: list[list[str]],
    loader: ShardedLoader | None,
    settings: RunSettings,
    loss_scale: LossScale | None,
    tracing: Tracing | None,
) -> TrainingStep:
    """Bind `optimizer` to what this rank owns, and return the step of this run. Collective.

    Args:
        groups: for each group of the optimizer the names of its parameters.
        loss_scale: of fp16; None for every other precision.

    Raises:
        StrategyRefused: the optimizer or a setting does not go with the strategy.
    """
    _bind_optimizer(optimizer, groups, local_model, settings, scaled=loss_scale is not None)
    in_backward = OptimizerInBackward(optimizer, local_model) if settings.step_in_backward else None
    scale_guard = None if loss_scale is None else LossScaleGuard(local_model, loss_scale, optimizer)
    return TrainingStep(local_model, BatchSizes(loader), in_backward, scale_guard, tracing)


def seed_this_rank(mesh: Mesh, seed: int) -> None:
    """Seed torch so that ranks with other samples or other layers draw other random numbers.

    Equal dropout masks on all ranks would be one mask for the global batch: a smaller sample. Ranks
    of one tensor axis share samples and layers, and must draw alike.
    """
    stage = (mesh.pipeline.rank,) if mesh.pipeline.size > 1 else ()
    torch.manual_seed(derive_seed(seed, mesh.data.rank, *stage))
