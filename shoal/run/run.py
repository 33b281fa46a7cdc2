"""One training run, seen from one rank: the methods that a loop calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.comm.assembly import gather_named_tensors
from shoal.comm.mesh import Mesh, register_cleanup
from shoal.comm.norm import full_tensor
from shoal.data.loader import DistributedBatchLoader
from shoal.data.seeds import derive_seed
from shoal.data.tree_map import in_dtype, tree_map
from shoal.errors import UsageError
from shoal.run import optimizer_binding, startup_summary
from shoal.run.backward_guard import BackwardGuard
from shoal.run.batch_size import BatchSizes
from shoal.run.checks import (
    check_frozen_unchanged,
    check_same_optimizer,
    refuse_misplaced,
    refuse_scaled,
    refuse_unprepared,
    refuse_with_servers,
    refuse_without_loader,
)
from shoal.run.clip import clip
from shoal.run.exact_evaluation import Measures, evaluate
from shoal.run.grad_accumulation import add_gradients, take_gradients
from shoal.run.loss_scaling import LossScaleGuard
from shoal.run.optimizer_in_backward import OptimizerInBackward, mean_only
from shoal.run.tracing import Tracing
from shoal.run.train_state import (
    TrainState,
    full_state_dict,
    layout_of,
    refuse_incomplete,
    save_model,
)
from shoal.strategies import base
from shoal.strategies.remote_optimizer import RemoteOptimizer
from shoal.strategies.transforms.precision import LossScale

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
SAMPLE_ROWS = 8
"""On which a model is traced and measured."""


@dataclass(frozen=True)
class RunSettings:
    """Numbers and choices of a run; `shoal.init` explains them."""

    seed: int
    accumulate: int
    step_in_backward: bool = False


class Run:
    """One training run, seen from one rank. Made by `shoal.init`.

    Attributes: rank, world: this process's number, and how many there are. device: where this
        rank's model and batches belong. totals: sums over all ranks of the last step: see
        `shoal.strategies.base`. None before the first.
    """

    def __init__(
        self,
        mesh: Mesh,
        strategies: list[base.Strategy],
        settings: RunSettings,
        loss_scale: LossScale | None,
        announce: Callable[[str], None],
        tracing: Tracing | None = None,
    ) -> None:
        self.mesh, self.rank, self.world, self.device = mesh, mesh.rank, mesh.size, mesh.device
        self.totals: Tensor | None = None
        self._strategies, self._settings = strategies, settings
        self._loss_scale, self._announce = loss_scale, announce
        self._tracing = tracing
        self._early: OptimizerInBackward | None = None
        self._overflow: LossScaleGuard | None = None
        self._part: base.LocalModel | None = None
        self._optimizer: Optimizer | None = None
        self._loader: DistributedBatchLoader | None = None
        self._model: nn.Module | None = None
        self._frozen: dict[str, nn.Parameter] = {}
        self._rows = BatchSizes(None)
        self._watch = BackwardGuard()
        self._stop = False

    def prepare(
        self, model: Model, optimizer: AnyOptimizer, loader: DataLoader | None = None
    ) -> tuple[Model, AnyOptimizer, Any]:
        """Make model, optimizer and loader those of this rank. Collective.

        The model keeps its class, its parameters' names and its `state_dict`; the optimizer is the
        same object, bound to what this rank owns; the loader yields this rank's share of every
        global batch of `loader.batch_size`.

        Raises: UsageError: called twice; an optimizer that does not hold each trainable parameter
            exactly once; a loader
                whose batches cannot be shared out.
            StrategyRefused: the strategy cannot take this model or world.
        """
        if self._part is not None:
            raise UsageError(
                "this run has prepared a model already; call shoal.init() once for each model."
            )
        refuse_misplaced(model, self.device)
        if loader is None:
            refuse_without_loader(self._settings.accumulate, self._settings.step_in_backward)
        groups = optimizer_binding.group_param_names(optimizer, model)
        shared = self._share_out(loader)
        part = self._cut(model, shared)
        self._take(part, optimizer, groups)
        self._watch.over(model)
        optimizer.register_step_post_hook(lambda *_: part.gather_params())
        if self._tracing is not None:
            self._tracing.wrap_step(part, optimizer)
        self._draw_apart()
        self._model = model
        self._part = part
        self._optimizer = optimizer
        self._loader = shared
        self._rows = BatchSizes(shared)
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        return model, optimizer, shared

    def forward_backward(
        self,
        loss_fn: base.LossFunction,
        model: nn.Module,
        *batch: Any,
        measure: base.Measure | None = None,
    ) -> Tensor:
        """Forward and backward of this rank's share of a global batch. Collective.

        Afterwards `.grad` holds the global means; the optimizer's step comes next. Calls before one
        step add up. Where fp16 overflows, `.grad` is NaN until that step, which is skipped. With
        `step_in_backward` the parameters are stepped by then, and there are no gradients. An error
        in the middle leaves some stepped.

        Args: loss_fn: (output, target) -> scalar mean over its batch, or (sum, count) where samples
            weigh differently. model: what `prepare` returned. batch: the model's inputs, then the
            target: `loss_fn(model(*inputs), target)`; what the loader yielded, in
                any order.
            measure: (output, target) -> 1-D tensor of sums over the batch, for `measured`.

        Returns: the global mean loss, a detached scalar on the device: the same on every rank.
        """
        part = self._prepared()
        assert self._model is not None
        check_same_optimizer(model, self._model)
        *inputs, target = batch
        loss_fn, rows, global_rows = self._rows.resolve(loss_fn, batch)
        if self._early is not None:
            loss_fn = mean_only(loss_fn)
        step = base.LocalBatch(
            loss_fn, tuple(inputs), target, rows, global_rows, measure, self._stop
        )
        earlier = take_gradients(part) if self._early is None else {}
        with self._watch, nullcontext() if self._early is None else self._early.hooked():
            loss = (
                base.forward_backward(part, step)
                if self._tracing is None
                else self._tracing.watch_passes(part, step)
            )
        base.rescale_by_count(part, loss, global_rows)
        if self._overflow is not None:
            self._overflow.unscale(earlier)
        add_gradients(earlier)
        totals = self.totals = loss.step_totals
        if loss.is_sum_and_count:
            return totals[base.LOSS_SUM] / base.count_or_one(totals)
        return totals[base.LOSS_SUM] / base.cached_scalar_tensor(
            global_rows, totals.dtype, totals.device
        )

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        Returns: the norm before, a scalar tensor. Call it between `forward_backward` and
        `optimizer.step()`."""
        part = self._prepared()
        self._refuse_without_gradients(
            "clip_gradients", "clipping needs the norm of all gradients at once"
        )
        return clip(part, max_norm)

    def gradients(self) -> dict[str, Tensor | None]:
        """Every trainable parameter's gradient, whole, under its own name. Collective."""
        self._refuse_without_gradients("gradients", "they have been used and freed")
        part = self._prepared()
        if part.strategy_state.has_rank_local_optimizer:
            raise UsageError(
                "gradients(): every rank steps by gradients of its own here; they are in `.grad`."
            )
        if part.remote_optimizer is not None:
            return part.remote_optimizer.gradients()
        return gather_named_tensors(
            part.pipeline_axis,
            {
                n: None if p.grad is None else full_tensor(p.grad)
                for n, p in part.trainable_params.items()
            },
        )

    def weights(self) -> dict[str, Tensor]:
        """The whole model's `state_dict`, under its own names and with rank 0's buffers, as
        `save` does. Collective.
        """
        part = self._prepared()
        self.synchronize()
        self.mesh.data.broadcast_buffers(part.module)
        return full_state_dict(part)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds of the model's parameters, under the whole model's names; shards
        are DTensors.
        """
        part = self._prepared()
        return {
            part.tied_names.get(name, name): parameter
            for name, parameter in part.module.named_parameters()
        }

    def report(self) -> list[str]:
        """Lines about what went on beside the steps, for the end of a run: staleness that
        servers have seen.
        """
        return self._prepared().strategy_state.report()

    @property
    def remote(self) -> RemoteOptimizer | None:
        """Who really owns the parameters, where those are other processes: parameter servers."""
        return self._prepared().remote_optimizer

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take each step together, so that it has global gradients."""
        return self._prepared().strategy_state.is_synchronous

    def wait(self) -> None:
        """Until this rank holds the weights of the last step; the model's next forward pass waits
        by itself.

        Call it before you read parameters in another way. Only parameter servers leave anything to
        wait for."""
        self._prepared().strategy_state.wait()

    def synchronize(self) -> bool:
        """Until all ranks hold the same weights, those of all steps; whether they had been apart.
        Collective.

        They are apart between the steps of parameter servers with staleness, and between the
        meetings of `local` and `diloco`. `evaluate`, `save` and `weights` begin with it."""
        return self._prepared().strategy_state.synchronize()

    def evaluate(self, measure: Measures, model: nn.Module, loader: DataLoader) -> dict[str, float]:
        """Sums over every sample of `loader`'s data set, each counted once, at any number of ranks.
        Collective.

        Args: measure: (output, target) -> name -> scalar sum over the batch, e.g. correct
            predictions. model: what was prepared, something around it, or another; it is put into
            evaluation mode and back. loader: a plain DataLoader; its `batch_size` is what one rank
            computes at once.

        Returns: the sums, and `samples`.
        """
        part = self._part
        if part is not None and all(module is not self._model for module in model.modules()):
            part = None
        if part is not None:
            self.synchronize()
        try:
            if part is not None:
                self.mesh.data.broadcast_buffers(part.module)
            all_forward = part is not None and part.collective_forward
            return evaluate(
                self.mesh.data, measure, model, loader, self.to_device, all_forward, part is None
            )
        finally:
            if part is not None:
                part.reshard()

    def to_device(self, batch: Any) -> Any:
        """A nest of tensors on this rank's device; the loader knows them there too."""
        if not isinstance(batch, Tensor):
            return tree_map(batch, self.to_device)
        moved = batch.to(self.device, non_blocking=True)
        if self._loader is not None:
            self._loader.yielded.track(batch, moved)
        return moved

    def request_stop(self) -> None:
        """Ask all ranks to stop; safe in a signal handler. They learn of it with the next
        step's gradients.
        """
        self._stop = True

    def stopping(self) -> bool:
        """Whether any rank had asked to stop when the last step began: the same answer on every
        rank.

        Waits for the device; on a GPU ask every few steps.
        """
        return self.totals is not None and bool(self.totals[base.STOP] > 0)

    def save(self, path: str | Path) -> None:
        """Write the whole model's `state_dict`, under the user's own names, as `torch.save` does.
        Collective.

        The file is replaced in one piece or not at all. Read it with `torch.load(path,
        weights_only=True)`."""
        part = self._prepared()
        self.synchronize()
        save_model(part, self.mesh, path)

    def outside_step(self, doing: str) -> AbstractContextManager[None]:
        """Around what belongs to no step, such as a save of one's own: a trace counts it as
        other time.
        """
        return nullcontext() if self._tracing is None else self._tracing.aside(doing)

    def end_trace(self) -> None:
        """Write what was traced so far, where the run ends before all that was asked for.
        Collective.
        """
        if self._tracing is not None:
            self._tracing.finish()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Everything that the rest of the run depends on, as (tensors, info, private). Collective.

        `tensors` are the same on every rank, `info` is made of JSON values, `private` is this
        rank's random state. Given back to `load_state`, the run goes on bit for bit at the same
        number of ranks."""
        resumable = self._resumable()
        self.synchronize()
        return resumable.state()

    def layout_of(self) -> Callable[[str], Tensor | None]:
        """Tells for each name in the tensors of `state` how this rank holds it, before there is
        any: see `Saved`.
        """
        return layout_of(self._prepared())

    def load_state(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> list[str]:
        """The inverse of `state`. Collective; after `prepare`. `private` is empty when the world
        has changed.

        Returns: sentences about what was lost with the number of ranks.
        """
        resumable = self._resumable()
        refuse_incomplete(info)
        self.wait()
        return resumable.load(tensors, info, private)

    def _share_out(self, loader: DataLoader | None) -> DistributedBatchLoader | None:
        """A loader of this rank's shares of the batches of `loader`."""
        if loader is None:
            return None
        recorder = None if self._tracing is None else self.mesh.recorder
        shared = DistributedBatchLoader(
            loader, self.mesh.data.rank, self.mesh.data.size, self._settings.seed, recorder
        )
        register_cleanup(shared)
        return shared

    def _cut(self, model: nn.Module, loader: DistributedBatchLoader | None) -> base.LocalModel:
        """Apply all strategies to the model, and announce what they say of it. Collective."""
        for line in startup_summary.lines(
            model, loader, self.mesh, self._settings.accumulate, self._strategies
        ):
            self._announce(line)
        part = base.apply_strategies(
            base.single_device(model, self._sample(model, loader)), self._strategies, self.mesh
        )
        for line in part.summary_lines:
            self._announce(line)
        return part

    def _take(self, part: base.LocalModel, optimizer: Optimizer, groups: list[list[str]]) -> None:
        """Have `optimizer` step what this rank owns, in the way that was asked for. Collective.

        Args: groups: names of the parameters of each of its groups.
        """
        scaled = self._loss_scale is not None
        optimizer_binding.refuse_shards(optimizer, part.trainable_params)
        optimizer_binding.bind_optimizer(optimizer, groups, part.trainable_params)
        if part.strategy_state.in_gradient_units:
            refuse_scaled(scaled)
        if part.remote_optimizer is not None:
            refuse_with_servers(scaled, self._settings.step_in_backward)
            part.remote_optimizer.attach(optimizer)
        self._early = (
            OptimizerInBackward(optimizer, part) if self._settings.step_in_backward else None
        )
        self._overflow = (
            None if self._loss_scale is None else LossScaleGuard(part, self._loss_scale, optimizer)
        )

    def _draw_apart(self) -> None:
        """Seed torch so that ranks with other samples or other layers draw differently.

        One dropout mask for all would be a smaller sample.
        """
        layers = (self.mesh.pipeline.rank,) if self.mesh.pipeline.size > 1 else ()
        torch.manual_seed(derive_seed(self._settings.seed, self.mesh.data.rank, *layers))

    def _sample(
        self, model: nn.Module, loader: DistributedBatchLoader | None
    ) -> base.ExampleBatch | None:
        """What the model will be called with, for those who slice it: a loader's items but the
        last, the target.
        """
        if loader is None or not any(strategy.needs_example_batch for strategy in self._strategies):
            return None
        rows = -(-loader.batch_size // (self.mesh.data.size * self._settings.accumulate))
        batch = self.to_device(loader.first(min(rows, SAMPLE_ROWS)))
        floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
        batch = in_dtype(batch, floating[0]) if floating else batch
        return (
            base.ExampleBatch(tuple(batch[:-1]), rows) if isinstance(batch, (tuple, list)) else None
        )

    def _resumable(self) -> TrainState:
        part = self._prepared()
        assert self._optimizer is not None
        return TrainState(part, self._optimizer, self._loader, self._loss_scale, self.mesh)

    def _prepared(self) -> base.LocalModel:
        part = refuse_unprepared(self._part)
        check_frozen_unchanged(self._frozen)
        return part

    def _refuse_without_gradients(self, call: str, reason: str) -> None:
        if self._early is not None:
            raise UsageError(f"{call}: with step_in_backward {reason}. Use step_in_backward=False.")
