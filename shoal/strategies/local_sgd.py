"""Local SGD and DiLoCo: each rank steps with its own gradients; ranks average every H steps.

      rank 0   step step step step ┐            step step step step ┐
      rank 1   step step step step ┤ sync round step step step step ┤ sync round  ...      H = 4
      rank 2   step step step step ┘            step step step step ┘
                                     │
      local=H     weights <- mean over ranks of the weights                       Stich, ICLR 2019
      diloco=H    change   <- mean over ranks of (weights at the last round - weights now)
                  momentum <- mu momentum + change
                  weights  <- weights at the last round - rate (change + mu momentum)
                                                    Douillard et al., DiLoCo, 2023, with
                                                    Nesterov's momentum

A sync round sends as much as one step of ddp, so a rank sends 1/H of ddp's bytes in H steps.

Evaluating, saving and `weights()` need one model for all ranks. They start a round of their own,
unless no step was taken since the last one, so no step is lost. The regular rounds stay at every
H-th step, because all ranks learn of stop requests there.

A round averages the running statistics of BatchNorm with the weights. Any other buffer that a rank
has changed becomes the first rank's.

A rank's gradient has the weight of its share of the global batch. With H = 1, SGD and any momentum,
the weights are therefore those of ddp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.buckets import bucketize
from shoal.comm.deterministic import mean
from shoal.comm.mesh import Mesh
from shoal.costs.step_cost import SentMessage, StepCost, total
from shoal.errors import StrategyRefused
from shoal.platform.tensors import MIB, accumulation_dtype, flatten_tensors, unflatten_tensors
from shoal.platform.torch_private.module_state import NormBase
from shoal.strategies.base import STOP, Forward, LocalBatch, LocalModel, StepResult, Strategy
from shoal.strategies.local_step import mean_result, scaled_for_mean
from shoal.strategies.module_snapshot import changed_since, mutable_buffers, snapshot
from shoal.strategies.options import DilocoOptions, LocalOptions
from shoal.strategies.state import StrategyState

BUCKET_BYTES = 25 * MIB
WORLD_CHANGED_MESSAGE = (
    "the number of ranks has changed, and each rank's optimizer state was its own: all ranks go on "
    "from the first one's"
)
PARTIAL_MESSAGE = (
    "strategy {name} averages whole models, and beside tensor and pipeline a rank has a part of "
    "one. Use ddp."
)
VELOCITY_PREFIX = "velocity."
"""Prefix of a parameter's name in checkpoints, for the outer optimizer's momentum."""


class LocalSgd(LocalOptions, Strategy):
    """Local SGD: average the weights of all ranks every H steps."""

    can_apply_again: ClassVar[bool] = True
    _action: ClassVar[str] = "weights are averaged"

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `run`, `gather_params` and `strategy_state`. Collective.

        Raises: StrategyRefused: nothing to train; beside tensor or pipeline.
        """
        name = self.name
        if not model.trainable_params:
            raise StrategyRefused(
                f"strategy {name} averages what was trained; the model has no trainable parameter."
            )
        if model.is_divided:
            raise StrategyRefused(PARTIAL_MESSAGE.format(name=name))
        mesh.data.broadcast_module(model.module)
        engine = LocalSgdStep(model, mesh.data, self)
        return replace(model, run=engine.run, gather_params=engine.gather, strategy_state=engine)

    def cost(self, step: StepCost) -> StepCost:
        """Return a step with 1/H of a sync round. An outer optimizer holds two models more."""
        if step.layout.data < step.layout.world:
            raise StrategyRefused(PARTIAL_MESSAGE.format(name=self.name))
        size = total(step.parameters_of_rank(0))
        held = 2 * size if isinstance(self, DilocoOptions) else 0.0
        if step.layout.data == 1:
            return replace(step, always_held={0: held}, is_exact=False)
        sync_round = SentMessage("all_reduce", size, share=1 / self.every, passes=4)
        return replace(step, always_held={0: held}, after_step={0: (sync_round,)}, is_exact=False)

    @property
    def deviations(self) -> list[str]:
        name, every = self.name, self.every
        return [
            f"{name}={every} is not exact: every rank steps by its own samples, and {self._action} "
            f"every {every} steps, and before evaluating and saving.",
            f"{name}={every}: between meetings loss and accuracy are those of the first rank's "
            "samples, and clipping is by each rank's own norm; a request to stop is heard at the "
            f"next regular meeting, at most {every} steps later.",
        ]


class Diloco(DilocoOptions, LocalSgd):
    """DiLoCo: step an outer optimizer by the mean change of all ranks, every H steps."""

    _action = "an outer optimizer steps by the mean change"


class LocalSgdStep(StrategyState):
    """Counts the steps of one rank, and makes sync rounds.

    Attributes:
        every: steps from one regular round to the next.
        outer: options of an outer optimizer; None for a plain mean of weights.
        steps: steps taken since the beginning of the run.
        stepped_since_round: a step was taken since the last round, regular or not.
        stepped_since_sync: a step was taken since `synchronize` was last called.
        has_run: a backward pass was made since this object was made or loaded. Before it, the
            optimizer has none of its gradients, and a step counts nothing.
        round_weights: weights of the last round, by name; only for an outer optimizer.
        velocity: momentum of the outer optimizer, by name.
    """

    has_rank_local_optimizer = True
    is_synchronous = False
    in_gradient_units = True

    def __init__(self, model: LocalModel, data: Axis, options: LocalOptions) -> None:
        self.model = model
        self.data = data
        self.every = options.every
        self.outer = options if isinstance(options, DilocoOptions) else None
        self.steps = 0
        self.stepped_since_round = False
        self.stepped_since_sync = False
        self.has_run = False
        self.round_weights: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.buffers = snapshot(model.module)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute one micro-batch.

        Totals are those of all ranks in the step before a regular round, and of this rank in other
        steps.
        """
        begins_step = batch.previous_totals is None
        if self.outer is not None and begins_step and not self.stepped_since_round:
            # Here and not at the end of a round: weights that are loaded or set before the next
            # step count too.
            self.round_weights = {
                name: parameter.detach().clone()
                for name, parameter in self.model.trainable_params.items()
            }
        self.has_run = True
        result = self.model.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return result
        if (self.steps + 1) % self.every == 0:
            totals = self.data.all_reduce(result.step_totals)
            return mean_result(result, totals, self.data.size)
        totals = result.step_totals.clone()
        totals[STOP] = 0  # no rank stops before all ranks know of it
        return result._replace(step_totals=totals)

    def gather(self) -> None:
        """Count a step that the optimizer has taken, and make the regular rounds. Collective."""
        if not self.has_run:
            return
        self.steps += 1
        self.stepped_since_round = True
        self.stepped_since_sync = True
        if self.steps % self.every == 0:
            self._sync_round()

    # State for checkpoints

    def synchronize(self) -> bool:
        if self.stepped_since_round:
            self._sync_round()
        were_different = self.stepped_since_sync
        self.stepped_since_sync = False
        return were_different

    def state_dict(self) -> dict[str, Tensor]:
        velocity = {f"{VELOCITY_PREFIX}{name}": value for name, value in self.velocity.items()}
        return velocity | {"steps": torch.tensor(self.steps)}

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        self.velocity = {
            name: state[f"{VELOCITY_PREFIX}{name}"].to(self.data.device, copy=True)
            for name in self.model.trainable_params
            if f"{VELOCITY_PREFIX}{name}" in state
        }
        self.steps = int(state.get("steps", 0))
        self.stepped_since_round = False
        self.stepped_since_sync = False
        self.has_run = False
        return [] if private else [WORLD_CHANGED_MESSAGE]

    # A sync round

    @torch.no_grad()
    def _sync_round(self) -> None:
        """Give all ranks the same weights and buffers. Collective.

        It may come between a backward pass and its step.
        """
        self.stepped_since_round = False
        if self.data.size == 1 and self.outer is None:
            return
        names = iter(self.model.trainable_params)
        values = [parameter.detach() for parameter in self.model.trainable_params.values()]
        for bucket in bucketize(values, BUCKET_BYTES):
            if self.outer is None:
                self._average(bucket)
            else:
                by_name = zip(islice(names, len(bucket)), bucket, strict=True)
                self._outer_step(self.outer, dict(by_name))
        norms = [layer for layer in self.model.module.modules() if isinstance(layer, NormBase)]
        stats = [tensor for layer in norms for tensor in (layer.running_mean, layer.running_var)]
        for bucket in bucketize([t for t in stats if t is not None], BUCKET_BYTES):
            self._average(bucket)
        self._share_buffers()

    def _average(self, tensors: list[Tensor]) -> None:
        for tensor, mean_value in zip(tensors, self._means(tensors), strict=True):
            tensor.copy_(mean_value)

    def _outer_step(self, outer: DilocoOptions, parameters: dict[str, Tensor]) -> None:
        """Step by SGD with Nesterov momentum, whose gradient is the mean change of the weights."""
        changes = []
        for name, parameter in parameters.items():
            dtype = accumulation_dtype(parameter.dtype)
            changes.append(self.round_weights[name].to(dtype) - parameter.to(dtype))
        for (name, parameter), change in zip(parameters.items(), self._means(changes), strict=True):
            velocity = self.velocity.setdefault(name, torch.zeros_like(change))
            weights = self.round_weights[name].to(change.dtype)
            velocity.mul_(outer.outer_momentum).add_(change)
            step = (change + outer.outer_momentum * velocity) * outer.outer_lr
            parameter.copy_(weights - step)
            self.round_weights[name].copy_(parameter)

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return means over ranks of tensors that are sent in one message, in float32 at least."""
        flat = flatten_tensors(tensors)
        flat = flat.to(accumulation_dtype(flat.dtype))
        return unflatten_tensors(mean(flat, self.data) if self.data.size > 1 else flat, tensors)

    def _share_buffers(self) -> None:
        """Broadcast the first rank's buffers, as far as a rank has changed them. Collective.

        They may be integers or flags, which have no mean.
        """
        changes = changed_since(self.model.module, self.buffers)
        if not changes or self.data.size == 1:
            return
        ranks_changing = self.data.sum_of_host_numbers([*changes.values()])
        buffers = mutable_buffers(self.model.module).values()
        for buffer, num_ranks in zip(buffers, ranks_changing, strict=True):
            if num_ranks:
                self.data.broadcast_tensor(buffer)
        self.buffers = snapshot(self.model.module)
