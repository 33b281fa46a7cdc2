"""One training run, as one rank sees it: the methods that a training loop calls.

Every method that says *Collective* must be called by all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.comm.mesh import Mesh
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.tree_map import tree_map
from shoal.errors import UsageError
from shoal.run import train_state
from shoal.run.checks import (
    check_frozen_unchanged,
    check_loader_not_needed,
    check_on_device,
    check_prepared,
    check_same_model,
)
from shoal.run.exact_evaluation import Measures, evaluate, evaluate_local_model
from shoal.run.gradients import clip_gradients, gather_gradients
from shoal.run.optimizer_binding import group_param_names
from shoal.run.preparation import (
    RunSettings,
    make_local_model,
    make_step,
    seed_this_rank,
    shard_loader,
)
from shoal.run.tracing import Tracing
from shoal.run.training_step import TrainingStep
from shoal.strategies import base
from shoal.strategies.remote_optimizer import RemoteOptimizer
from shoal.strategies.transforms.precision import LossScale

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Run:
    """One training run, as one rank sees it. `shoal.init` makes it.

    Attributes:
        rank, world: the number of this process, and the number of processes.
        device: the device of this rank's model and batches.
        totals: sums over all ranks of the last step, (TOTALS_LENGTH,): loss sum, count, stop
            requests, measures; see `shoal.strategies.base`. None before the first step.
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
        self.mesh = mesh
        self.rank = mesh.rank
        self.world = mesh.size
        self.device = mesh.device
        self.totals: Tensor | None = None
        self._strategies = strategies
        self._settings = settings
        self._loss_scale = loss_scale
        self._announce = announce
        self._tracing = tracing
        self._stop_requested = False
        # Set by `prepare`:
        self._model: nn.Module | None = None
        self._part: base.LocalModel | None = None
        self._optimizer: Optimizer | None = None
        self._loader: ShardedLoader | None = None
        self._step: TrainingStep | None = None
        self._frozen: dict[str, nn.Parameter] = {}

    def prepare(
        self, model: Model, optimizer: AnyOptimizer, loader: DataLoader | None = None
    ) -> tuple[Model, AnyOptimizer, Any]:
        """Make model, optimizer and loader those of this rank. Collective.

        The model keeps its class, its parameters' names and its `state_dict`. The optimizer is the
        same object, bound to the parameters that this rank owns. The loader yields this rank's
        share of every global batch of `loader.batch_size` samples.

        Raises:
            UsageError: `prepare` was called before; the optimizer does not hold each trainable
                parameter exactly once; the batches of the loader cannot be divided among ranks.
            StrategyRefused: the strategy cannot take this model or this number of ranks.
        """
        if self._part is not None:
            raise UsageError(
                "this run has prepared a model already; call shoal.init() once for each model."
            )
        settings, tracing = self._settings, self._tracing
        check_on_device(model, self.device)
        if loader is None:
            check_loader_not_needed(settings.accumulate, settings.step_in_backward)
        # By name, because a strategy may replace parameters by shards of them.
        groups = group_param_names(optimizer, model)
        recorder = None if tracing is None else self.mesh.recorder
        sharded_loader = shard_loader(loader, self.mesh, settings.seed, recorder, self._announce)
        local_model = make_local_model(
            model, sharded_loader, self.mesh, self._strategies, settings.accumulate, self._announce
        )
        step = make_step(
            local_model, optimizer, groups, sharded_loader, settings, self._loss_scale, tracing
        )
        step.guard.watch(model)
        optimizer.register_step_post_hook(lambda *_: local_model.gather_params())
        if tracing is not None:
            tracing.wrap_step(local_model, optimizer)
        seed_this_rank(self.mesh, settings.seed)
        self._model = model
        self._part = local_model
        self._step = step
        self._optimizer = optimizer
        self._loader = sharded_loader
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        return model, optimizer, sharded_loader

    def forward_backward(
        self,
        loss_fn: base.LossFunction,
        model: nn.Module,
        *batch: Any,
        measure: base.Measure | None = None,
    ) -> Tensor:
        """Compute the loss of this rank's share of a global batch, and its gradients. Collective.

        Afterwards `.grad` holds the global means, and the optimizer's step comes next. Calls before
        one step add up. If fp16 overflows, `.grad` is NaN until that step, which is skipped. With
        `step_in_backward` the parameters are stepped already, and no gradients remain; an error in
        the middle leaves some parameters stepped.

        Args:
            loss_fn: (output, target) -> scalar mean over its batch, or (sum, count) if samples
                weigh differently.
            model: the one that `prepare` returned.
            batch: the model's inputs, then the target: `loss_fn(model(*inputs), target)`. Batches
                of the loader may come in any order.
            measure: (output, target) -> 1-D tensor of sums over the batch, to be summed over all
                ranks into `totals[3:]`.

        Returns: the global mean loss, a detached scalar on the device, equal on every rank.
        """
        self._prepared()
        assert self._model is not None
        assert self._step is not None
        check_same_model(model, self._model)
        loss, self.totals = self._step.forward_backward(
            loss_fn, batch, measure, self._stop_requested
        )
        return loss

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`. Collective.

        Call it between `forward_backward` and `optimizer.step()`.

        Returns: the norm before, a scalar tensor.
        """
        local_model = self._prepared()
        self._check_has_gradients(
            "clip_gradients", "clipping needs the norm of all gradients at once"
        )
        return clip_gradients(local_model, max_norm)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full gradient of every trainable parameter, under its name. Collective."""
        self._check_has_gradients("gradients", "they have been used and freed")
        local_model = self._prepared()
        if local_model.strategy_state.has_rank_local_optimizer:
            raise UsageError(
                "gradients(): every rank steps by gradients of its own here; they are in `.grad`."
            )
        return gather_gradients(local_model)

    def weights(self) -> dict[str, Tensor]:
        """Return the full model's `state_dict`, under the model's own names. Collective.

        Buffers are those of rank 0, as in the file that `save` writes.
        """
        local_model = self._prepared()
        self.synchronize()
        self.mesh.data.broadcast_buffers(local_model.module)
        return train_state.full_state_dict(local_model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, under the full model's names. Shards are DTensors."""
        local_model = self._prepared()
        return {
            local_model.tied_names.get(name, name): parameter
            for name, parameter in local_model.module.named_parameters()
        }

    def report(self) -> list[str]:
        """Return lines for the end of a run, such as the staleness that servers have measured."""
        return self._prepared().strategy_state.report()

    @property
    def remote(self) -> RemoteOptimizer | None:
        """The parameter servers, if they own the parameters; None if this process steps them."""
        return self._prepared().remote_optimizer

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks take each step together, so that a step has global gradients."""
        return self._prepared().strategy_state.is_synchronous

    def wait(self) -> None:
        """Wait until this rank holds the weights of the last step, before you read parameters.

        The model's next forward pass waits by itself. Only parameter servers leave work behind.
        """
        self._prepared().strategy_state.wait()

    def synchronize(self) -> bool:
        """Wait until all ranks hold the same weights, those of all steps. Collective.

        Weights differ between ranks between the steps of parameter servers with staleness, and
        between the averaging steps of `local` and `diloco`. `evaluate`, `save`, `state` and
        `weights` call this first.

        Returns: True if the weights differed.
        """
        return self._prepared().strategy_state.synchronize()

    def evaluate(self, measure: Measures, model: nn.Module, loader: DataLoader) -> dict[str, float]:
        """Sum a measure over every sample of a data set, each counted once. Collective.

        Args:
            measure: (output, target) -> name -> scalar sum over the batch.
            model: the prepared one, a wrapper of it, or another; in evaluation mode meanwhile.
            loader: a plain DataLoader; one rank computes `batch_size` samples at once.

        Returns: name -> sum, and `samples`; the same bits at any number of ranks.
        """
        local_model = self._part
        if local_model is None or all(module is not self._model for module in model.modules()):
            return evaluate(self.mesh.data, measure, model, loader, self.to_device)
        self.synchronize()
        return evaluate_local_model(
            self.mesh.data, measure, model, loader, self.to_device, local_model
        )

    def to_device(self, batch: Any) -> Any:
        """Return a nest of tensors on this rank's device.

        The loader still knows the batch by the new tensors, so `forward_backward` finds its size.
        """
        if not isinstance(batch, Tensor):
            return tree_map(batch, self.to_device)
        on_device = batch.to(self.device, non_blocking=True)
        if self._loader is not None:
            self._loader.yielded.track(batch, on_device)
        return on_device

    def request_stop(self) -> None:
        """Ask all ranks to stop, with the next step's gradients. Safe in a signal handler."""
        self._stop_requested = True

    def stopping(self) -> bool:
        """Return True if any rank had asked to stop when the last step began.

        It is the same on every rank. The call waits for the device: on a GPU, not in each step.
        """
        return self.totals is not None and bool(self.totals[base.STOP] > 0)

    def save(self, path: str | Path) -> None:
        """Write the full model's `state_dict`, as `torch.save` does. Collective.

        The file has the model's own names, and is replaced in one piece or not at all. Read it with
        `torch.load(path, weights_only=True)`.
        """
        local_model = self._prepared()
        self.synchronize()
        train_state.save_model(local_model, self.mesh, path)

    def outside_step(self, doing: str) -> AbstractContextManager[None]:
        """Return a context for work that belongs to no step, such as a save of your own.

        A trace shows that time under the name `doing`.
        """
        return nullcontext() if self._tracing is None else self._tracing.outside_step(doing)

    def end_trace(self) -> None:
        """Write the steps traced so far, if the run ends within the traced window. Collective."""
        if self._tracing is not None:
            self._tracing.finish()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Return all that the rest of the run depends on: (tensors, info, private). Collective.

        `tensors` are the same on every rank, `info` consists of JSON values, `private`
        is this rank's random state. After `load_state` the run goes on bit for bit at the same
        number of ranks.
        """
        resumable = self._train_state()
        self.synchronize()
        return resumable.state()

    def layout_of(self) -> Callable[[str], Tensor | None]:
        """Return a function from a name in `state`'s tensors to this rank's tensor, or None.

        From it, `Checkpoints.load` knows which shard of a tensor this rank needs to read.
        """
        return train_state.layout_of(self._prepared())

    def load_state(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> list[str]:
        """Load what `state` returned. Collective; call it after `prepare`.

        Args:
            private: this rank's own; empty if the number of ranks has changed.

        Returns: sentences about state that was lost with a change of the number of ranks.
        """
        resumable = self._train_state()
        train_state.check_complete(info)
        self.wait()
        return resumable.load(tensors, info, private)

    def _train_state(self) -> train_state.TrainState:
        local_model = self._prepared()
        assert self._optimizer is not None
        return train_state.TrainState(
            local_model, self._optimizer, self._loader, self._loss_scale, self.mesh
        )

    def _prepared(self) -> base.LocalModel:
        local_model = check_prepared(self._part)
        check_frozen_unchanged(self._frozen)
        return local_model

    def _check_has_gradients(self, call: str, reason: str) -> None:
        """Raise UsageError if gradients are stepped and freed in the backward pass."""
        if self._step is not None and self._step.optimizer_in_backward is not None:
            raise UsageError(f"{call}: with step_in_backward {reason}. Use step_in_backward=False.")
