"""Local steps: every rank steps by its own gradients, and the ranks meet only now and then.

      rank 0   step step step step ┐            step step step step ┐
      rank 1   step step step step ┤ meeting ── step step step step ┤ meeting ── ...      H = 4
      rank 2   step step step step ┘            step step step step ┘
                                     │
      local=H     all weights become their mean                                   Stich, ICLR 2019
      diloco=H    change = mean over ranks of (weights at the last meeting - weights now)
                  momentum <- mu momentum + change
                  weights <- weights at the last meeting - rate (change + mu momentum)
                                                              Douillard et al., DiLoCo, 2023:
                                                              Nesterov's momentum

A meeting sends as much as one step of ddp, so over H steps a rank sends 1/H of it. Whatever wants
one model for all
(evaluating, saving, `weights()`) is a meeting too, unless no step was taken since the last one:
nothing that was learned is left out. The regular meetings stay where they are, for there all ranks
learn of requests to stop. Running statistics of BatchNorm are averaged with the weights; any other
buffer that has changed becomes the first rank's.

A rank's gradient weighs as its share of the global batch does, so that with H = 1, SGD and any
momentum the weights are those of ddp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.buckets import apply_flattened, bucketize
from shoal.comm.compression.reducers import uncompressed_bytes
from shoal.comm.deterministic import mean
from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.platform.tensors import MIB, accumulation_dtype
from shoal.platform.torch_private.module_state import NormBase
from shoal.strategies.base import STOP, Forward, LocalBatch, LocalModel, StepResult, Strategy
from shoal.strategies.buffer_versions import changed_since, mutable_buffers, snapshot
from shoal.strategies.mean_scaling import mean_result, scaled_for_mean
from shoal.strategies.options import DilocoOptions, LocalOptions
from shoal.strategies.state import StrategyState

BUCKET_BYTES = 25 * MIB
NOT_SHARDABLE_MESSAGE = "local steps keep every rank's whole optimizer anyway. Use zero1, zero2 or zero3, which shard it."
WORLD_CHANGED_MESSAGE = "the number of ranks has changed, and each rank's optimizer state was its own: all ranks go on from the first one's"


class LocalSgd(LocalOptions, Strategy):
    """Local SGD: the mean of all weights, every so many steps."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces run, gather and late_gradients. Collective.

        Raises: StrategyRefused: nothing to train; beside tensor or pipeline.
        """
        return _cut(model, mesh, self.name, self.every, None)

    @property
    def deviations(self) -> list[str]:
        return _notes(self.name, self.every, "weights are averaged")


class Diloco(DilocoOptions, Strategy):
    """DiLoCo: an outer optimizer steps by what the ranks have changed on average, every so many
    steps.
    """

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces run, gather and late_gradients. Collective.

        Raises: StrategyRefused: nothing to train; beside tensor or pipeline.
        """
        return _cut(
            model, mesh, self.name, self.every, OuterOptimizer(self.outer_lr, self.outer_momentum)
        )

    @property
    def deviations(self) -> list[str]:
        return _notes(self.name, self.every, "an outer optimizer steps by the mean change")


class OuterOptimizer:
    """The outer optimizer. It is SGD with Nesterov's momentum, whose gradient is the mean
    change.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum

    def step(self, change: Tensor, velocity: Tensor) -> Tensor:
        """What is to be taken off the weights; `velocity` is updated."""
        velocity.mul_(self.momentum).add_(change)
        return (change + self.momentum * velocity) * self.rate


def _notes(name: str, every: int, what: str) -> list[str]:
    return [
        f"{name}={every} is not exact: every rank steps by its own samples, and {what} every "
        f"{every} steps, and before "
        "evaluating and saving.",
        f"{name}={every}: between meetings loss and accuracy are those of the first rank's "
        "samples, and clipping is by "
        "each rank's own norm; a request to stop is heard at the next regular meeting, at most "
        f"{every} steps later.",
    ]


def _cut(
    part: LocalModel, mesh: Mesh, name: str, every: int, outer: OuterOptimizer | None
) -> LocalModel:
    if not part.trainable_params:
        raise StrategyRefused(
            f"strategy {name} averages what was trained; the model has no trainable parameter."
        )
    if part.is_partial or part.has_sharded_params:
        raise StrategyRefused(
            f"strategy {name} averages whole models, and beside tensor and pipeline a rank has a "
            "part of one. Use ddp."
        )
    mesh.data.broadcast_module(part.module)
    engine = LocalSgdStep(part, mesh.data, every, outer)
    sent, ranks = engine.bytes_per_sync() / 1e6, mesh.data.size
    said = (
        f"{name}={every}: a rank sends {sent:,.3g} MB at a meeting, {sent / every:,.3g} MB a step; "
        "ddp sends "
        f"{sum(uncompressed_bytes(p.numel(), p.dtype, ranks) for p in part.trainable_params.values()) / 1e6:,.3g} MB a step"
    )
    run, gather = engine.run, engine.gather
    return replace(
        part,
        run=run,
        gather_params=gather,
        grads_not_ready_reason=NOT_SHARDABLE_MESSAGE,
        strategy_state=engine,
        summary_lines=(*part.summary_lines, said),
    )


class LocalSgdStep(StrategyState):
    """Counts steps, and meets.

    Attributes: steps: that were taken in all; every so many there is a meeting. moved: a step was
        taken since the last meeting. apart: a step was taken since ranks were last asked to agree.
        begun: a step has begun since the state was made or loaded; before, the optimizer has no
        gradient of ours.
    """

    has_rank_local_optimizer = True
    is_synchronous = False

    def __init__(
        self, part: LocalModel, data: Axis, every: int, outer: OuterOptimizer | None
    ) -> None:
        self.part, self.data, self.every, self.outer = part, data, every, outer
        self.steps = 0
        self.moved = self.apart = self.begun = False
        self.met_at: dict[
            str, Tensor
        ] = {}  # only for an outer optimizer: the weights of the last meeting
        self.velocity: dict[str, Tensor] = {}
        self.buffers = snapshot(part.module)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """One micro-batch. In the step before a meeting the totals are of all ranks; in others
        they are this rank's.
        """
        if self.outer is not None and not self.moved and batch.previous_totals is None:
            # Not only at the end of a meeting, for what is loaded or set until the next step counts
            # as well.
            self.met_at = {
                name: parameter.detach().clone()
                for name, parameter in self.part.trainable_params.items()
            }
        self.begun = True
        loss = self.part.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return loss
        if (self.steps + 1) % self.every == 0:
            return mean_result(
                self.data.all_reduce(loss.step_totals), self.data.size, loss.is_sum_and_count
            )
        totals = loss.step_totals.clone()
        totals[STOP] = 0  # nobody stops before all know of it
        return StepResult(totals, loss.is_sum_and_count)

    def gather(self) -> None:
        """The optimizer has stepped."""
        if not self.begun:
            return
        self.steps += 1
        self.moved = self.apart = True
        if self.steps % self.every == 0:
            self._sync_round()

    def bytes_per_sync(self) -> int:
        """What this rank sends at a meeting."""
        owned = self.part.trainable_params.values()
        return sum(
            uncompressed_bytes(p.numel(), accumulation_dtype(p.dtype), self.data.size)
            for p in owned
        )

    # What is kept from step to step

    def synchronize(self) -> bool:
        if self.moved:
            self._sync_round()
        apart, self.apart = self.apart, False
        return apart

    def state_dict(self) -> dict[str, Tensor]:
        velocity = {f"velocity.{name}": value for name, value in self.velocity.items()}
        return velocity | {"steps": torch.tensor(self.steps)}

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Nothing beside the state of its optimizer, which is saved for each rank that steps
        alone.
        """
        return {}

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        prefix = "velocity."
        found = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        self.velocity = {
            name: found[name].to(self.data.device, copy=True)
            for name in self.part.trainable_params
            if name in found
        }
        self.steps = int(state.get("steps", 0))
        self.moved = self.apart = self.begun = False
        return [] if private else [WORLD_CHANGED_MESSAGE]

    # A meeting

    @torch.no_grad()
    def _sync_round(self) -> None:
        """All ranks hold the same afterwards. It may come between a backward pass and its step.
        Collective.
        """
        self.moved = False
        if self.data.size == 1 and self.outer is None:
            return
        names = iter(self.part.trainable_params)
        for batch in bucketize(
            [p.detach() for p in self.part.trainable_params.values()], BUCKET_BYTES
        ):
            if self.outer is None:
                self._mean(batch)
            else:
                self._step(self.outer, dict(zip(islice(names, len(batch)), batch, strict=True)))
        for batch in bucketize(batchnorm_stats(self.part.module), BUCKET_BYTES):
            self._mean(batch)
        self._share_buffers()

    def _mean(self, tensors: list[Tensor]) -> None:
        for tensor, found in zip(tensors, self._means(tensors), strict=True):
            tensor.copy_(found)

    def _step(self, outer: OuterOptimizer, parameters: dict[str, Tensor]) -> None:
        changes = []
        for name, parameter in parameters.items():
            dtype = accumulation_dtype(parameter.dtype)
            changes.append(self.met_at[name].to(dtype) - parameter.to(dtype))
        for (name, parameter), change in zip(parameters.items(), self._means(changes), strict=True):
            velocity = self.velocity.setdefault(name, torch.zeros_like(change))
            parameter.copy_(self.met_at[name].to(change.dtype) - outer.step(change, velocity))
            self.met_at[name].copy_(parameter)

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over ranks, of tensors that are sent as one; in float32 at least."""
        return apply_flattened(self._mean_of_flat, tensors)

    def _mean_of_flat(self, flat: Tensor) -> Tensor:
        flat = flat.to(accumulation_dtype(flat.dtype))
        return mean(flat, self.data) if self.data.size > 1 else flat

    def _share_buffers(self) -> None:
        """What no mean can be taken of becomes the first rank's, where any rank has changed it."""
        changes = changed_since(self.part.module, self.buffers)
        if not changes or self.data.size == 1:
            return
        flags = torch.tensor([*changes.values()], dtype=torch.int64, device=self.data.device)
        buffers = mutable_buffers(self.part.module).values()
        for buffer, ranks in zip(buffers, self.data.all_reduce(flags).tolist(), strict=True):
            if ranks:
                self.data.broadcast_tensor(buffer)
        self.buffers = snapshot(self.part.module)


def batchnorm_stats(module: nn.Module) -> list[Tensor]:
    """Running means and variances."""
    norms = [m for m in module.modules() if isinstance(m, NormBase)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
