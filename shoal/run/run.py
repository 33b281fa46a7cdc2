"""One training run, as one rank sees it: the methods that a training loop calls.

Every method that says *Collective* must be called by all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.sharded_loader import ShardedLoader
from shoal.data.tree_map import to_device, tree_map
from shoal.errors import ShoalError, UsageError
from shoal.run import checks
from shoal.run.ema import Ema
from shoal.run.exact_evaluation import OneEvaluation
from shoal.run.example_batch import example_of
from shoal.run.gradients import clip_gradients, gather_gradients
from shoal.run.loop_loss import LoopLoss
from shoal.run.preparation import sort_arguments
from shoal.run.prepared import Prepared
from shoal.run.replica_check import check_replicas
from shoal.run.row_gathering import RowGathering
from shoal.run.stateful_run import StatefulRun
from shoal.run.step import TrainingStep, make_batch, weighted_by_rank
from shoal.run.step_checks import StepChecks
from shoal.strategies import base
from shoal.trace.recorder import ASIDE
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress

GRAPH_ONCE = (
    "run.backward(retain_graph=True): a graph is used by one run.backward. Add up the losses of a "
    "step that share a part of it: run.backward(loss_1 + loss_2). Leave retain_graph out where "
    "nothing is shared, and compute again, or detach, what a later step takes: hidden.detach()."
)


class Run(StatefulRun):
    """One training run, as one rank sees it. `shoal.init` makes it.

    Attributes:
        totals: sums over all ranks of the last step, (TOTALS_LENGTH,): loss sum, count, stop
            requests, summed values; see `shoal.strategies.base`. None before the first step.
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.totals: Tensor | None = None
        self._settings = prepared.settings
        self._stop_requested = False
        self._gathering = RowGathering(prepared)
        self._loop = LoopLoss(prepared)
        self._checks = StepChecks(prepared, self._gathering, self._loop)

    def prepare(self, *things: Any) -> Any:
        """Make models, optimizers and loaders those of this rank. Collective.

        Any number of each, in any order. A model keeps its class, its parameters' names and its
        `state_dict`. An optimizer is the same object, bound to the parameters that this rank owns.
        A loader yields this rank's share of every global batch of `loader.batch_size` samples.

        It may be called again: with another loader; with a frozen model, such as a teacher; with a
        new optimizer in the place of one that has the same parameters. Under ddp and zero also
        after layers were frozen, thawed or replaced, and with further models.

        Returns: the same things in the same order, one alone if there is one.
        Raises:
            UsageError: an argument is neither of these; the optimizers do not hold each trainable
                parameter exactly once; the batches of a loader cannot be divided among ranks.
            StrategyRefused: the strategy cannot take these models or this number of ranks.
        """
        models, optimizers, loaders = sort_arguments(things)
        averages: AbstractContextManager[None] = nullcontext()
        if self._ema is not None and (models or optimizers):
            averages = self._ema.prepared_again()
        with self._calls.during("run.prepare"), averages:
            shared = iter(self._prepared.add(models, optimizers, loaders))
            if self._prepared.models:
                self._loop.watch()
        results = [
            next(shared) if any(thing is loader for loader in loaders) else thing
            for thing in things
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def forward_backward(
        self,
        compute_loss: base.ComputeLoss,
        *batch: Any,
        rows: int | None = None,
        reduction: str = "rows",
        **named_batch: Any,
    ) -> Any:
        """Compute the loss of this rank's share of a global batch, and its gradients. Collective.

        Afterwards `.grad` holds the global means, and the optimizer's step comes next. Calls before
        one step add up. If fp16 overflows, `.grad` is NaN until that step, which is skipped.

        Args:
            compute_loss: (*batch, **named_batch) -> loss or (loss, extra). It calls the prepared
                models in any way. A loss is the mean over its samples, a scalar tensor, or
                `shoal.counted(sum, count)` if samples weigh differently, or a sum of such. `extra`
                is any nest of tensors and numbers; `shoal.summed(x)` in it is summed over all
                ranks.
            batch: nests of tensors whose dimension 0 is the batch. Batches of the loader may come
                in any order.
            named_batch: the same, by name.
            rows: samples on this rank, for a batch that no prepared loader has made; by default
                the length of its tensors.
            reduction: "rows" for the mean over all samples; "ranks" for the mean of the ranks'
                means, which differs from one device's loss if it is no mean over samples.

        Returns: the global mean loss, a detached scalar on the device, equal on every rank; and
            with `extra` the pair (loss, extra), with the values of this rank's samples.
        """
        checks.check_compute_loss(compute_loss, batch)
        checks.check_step_options(rows, reduction)
        if self._loop.watches:
            self._loop.before_function()
        with self._calls.during("run.forward_backward"):
            parts = self._prepared.sizes, self.mesh, self._settings.accumulate
            make = partial(make_batch, compute_loss, batch, named_batch, *parts, rows)
            return self._forward_backward(make, reduction)

    def backward(
        self,
        loss: Any,
        rows: int | None = None,
        reduction: str = "rows",
        retain_graph: bool = False,
    ) -> Tensor:
        """Compute the gradients of a loss that the loop has computed of its batch. Collective.

            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()

        Afterwards it is as after `forward_backward`. In the first steps and some later ones, ranks
        look at the graphs of their losses: what they divide by, and whether samples influence one
        another. Not all is told by a graph, so `shoal verify` is the proof.
        Mixed precision stands around calls of the prepared models, which return float32 then.

        Args:
            loss: of this rank's samples: their mean, a scalar tensor, or `shoal.counted(sum,
                count)`, or a sum of such.
            rows: samples on this rank; by default those of the batch that the models were called
                with.
            reduction: as for `forward_backward`.
            retain_graph: refused, for a graph is used once: add the losses of a step.

        Returns: the global mean loss, a detached scalar on the device, equal on every rank; of a
            micro-batch, its share of that of the batch.
        Raises:
            StrategyRefused: under a pipeline, whose loss must be a function.
            UsageError: `loss` is no loss, or a sum, or divides by what each rank has counted; the
                number of samples is not clear; `accumulate` above 1 outside of `microbatches`;
                draws="global".
        """
        checks.check_step_options(rows, reduction)
        if retain_graph:
            raise UsageError(GRAPH_ONCE)
        with self._calls.during("run.backward"):
            make = partial(self._loop.make_batch, loss, rows, reduction)
            mean: Tensor = self._forward_backward(make, reduction)
            return mean

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Yield this rank's batch in `accumulate` parts, for one `backward` each. Collective.

            for x, y in run.microbatches((x, y)):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()

        Args:
            batch: a nest of tensors whose dimension 0 is the batch, of a prepared loader or of
                `run.share`.

        Raises: UsageError: no `backward` was called for a part.
        """
        return self._loop.microbatches(batch)

    def step(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a loss function, so that a call with a batch is `forward_backward` of it.

            @run.step
            def step(x, y):
                return F.cross_entropy(model(x), y)

        Then `loss = step(x, y)` takes a step.
        """
        checks.check_compute_loss(compute_loss, ())
        return wraps(compute_loss)(partial(self.forward_backward, compute_loss))

    def _forward_backward(self, make: Callable[[], base.LocalBatch], reduction: str) -> Any:
        """Take a step. Collective.

        Args: make: returns the local batch.
        """
        self._prepared.local_model()  # raises where nothing is prepared, or a layer was thawed
        self._checks.begin()
        batch = make()
        if self._stop_requested:
            batch = batch._replace(stop_requested=True)
        if reduction == "ranks":
            batch = weighted_by_rank(batch, self.mesh.data.size)
        self._gathering.begin_step(batch)
        try:
            self._checks.before(batch, reduction)
            step = self._step_of(batch)
            batch = self._gathering.before_passes(batch)
            with self._checks.passes(batch.step.compute_loss):
                output = step.forward_backward(batch)
        except (ValueError, RuntimeError, IndexError, ShoalError) as error:
            in_parts = self._settings.accumulate > 1 or self.mesh.pipeline.size > 1
            found = checks.error_of_step(error, batch, in_parts)
            if found is error:
                raise
            raise found from error
        finally:
            self._gathering.end_step()
        self.totals = output.totals
        self._checks.after(output)
        return output.loss if output.extra is None else (output.loss, output.extra)

    def _step_of(self, batch: base.LocalBatch) -> TrainingStep:
        """Return the step of the local model; the first batch may be needed to make it."""
        prepared = self._prepared
        if prepared.step is None:
            if not prepared.optimizers:
                raise UsageError(
                    "forward_backward: no optimizer was prepared. Before the loop: model, "
                    "optimizer, loader = run.prepare(model, optimizer, loader)."
                )
            with self._gathering.planning(batch.step.compute_loss):
                with self._prepared.guards.phase:
                    facts = self._settings.accumulate, prepared.sizes.full_batch_rows()
                    example = example_of(batch, prepared.models, self.mesh, *facts)
                prepared.apply(example)
        assert prepared.step is not None
        return prepared.step

    def gather(self, tensor: Tensor, views: int = 1) -> Tensor:
        """Return the rows of all ranks, in the order of the global batch. Collective.

        For a loss that couples samples: compute it from gathered rows, whole on every rank or, as
        a mean over `rows`, for this rank's own samples. Gradients flow back to all ranks, so
        every rank's loss must depend on the result, unless it needs no gradient.

        Args:
            tensor: (rows, ...), any dtype; ranks may have different numbers of rows.
            views: views of the samples that `tensor` has, one behind the other, as
                `model(torch.cat([x1, x2]))` returns them. All first views come first then, and
                `rows` is of one view.

        Returns: (rows of all ranks, ...), the same on every rank.
        Raises:
            StrategyRefused: the global batch is not computed at once, or by different weights.
            UsageError: rows of different shapes or dtypes; inside of `evaluate`; rows of a loss
                inside of `microbatches`.
        """
        checks.check_tensor("run.gather", tensor)
        checks.check_views(views, len(tensor))
        with self._calls.during("run.gather"):
            self._loop.check_gather(tensor)
            return self._gathering.gather_views(tensor, views, self._local_model())

    @property
    def rows(self) -> slice:
        """This rank's rows in the tensor that `gather` has returned last."""
        return self._gathering.rows

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`. Collective.

        Call it between `forward_backward` and `optimizer.step()`. `norm_type` is 2 or, for the
        largest absolute value, infinity.

        Returns: the norm before, a scalar tensor.
        """
        checks.check_norm(max_norm, norm_type)
        return clip_gradients(self._local_model(), max_norm, norm_type)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients as `torch.nn.utils.clip_grad_norm_` does. Collective.

        Of all trainable parameters it is `clip_gradients`, and right under every strategy. Of some
        of them, it is torch's own, which a pipeline and servers refuse.

        Returns: the norm before, a scalar tensor.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        shown = [p for model in self._prepared.models for p in model.parameters()]
        # The judge of a GAN may rest while the maker is clipped, and keep its gradients.
        trained = {id(p) for p in shown if p.requires_grad or p.grad is not None}
        if trained <= {id(parameter) for parameter in given}:
            return self.clip_gradients(max_norm, norm_type)
        checks.check_norm(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the full gradients of all trainable parameters, by name. Collective."""
        local_model = self._local_model()
        if local_model.strategy_state.has_rank_local_optimizer:
            raise UsageError(
                "gradients(): every rank steps by gradients of its own here; they are in `.grad`."
            )
        return gather_gradients(local_model)

    @property
    def finite(self) -> bool:
        """True if losses and gradients of this step were finite on all ranks, in all of its calls.

        Else it is skipped: `optimizer.step()` leaves the weights as they are. Under `local`,
        `diloco` and servers with staleness it is about this rank alone.
        """
        return self._prepared.nonfinite_steps.is_finite

    def check_replicas(self) -> None:
        """Compare the bits of weights and optimizer state on ranks that hold the same. Collective.

        Shards of zero have no replicas, and are not compared; nor are the ranks of strategies that
        step by themselves.

        Raises: ReplicasDiffer: on every rank; with three ranks or more it tells which is wrong.
        """
        local_model = self._local_model()
        self.wait()
        check_replicas(local_model, self._prepared.optimizers, self.mesh)

    def edit(self) -> AbstractContextManager[None]:
        """Return a context in which you may write weights, the same on all ranks. Collective.

        All ranks hold the weights of all steps when it begins. Parameter servers get the weights
        when it ends. No other strategy needs it.

        Raises: UsageError: under servers, between `forward_backward` and `optimizer.step()`.
        """
        self._local_model()
        return self._prepared.guards.edit()

    def evaluate(
        self,
        compute_sums: Callable[..., Any],
        loader: Any,
        *models: nn.Module,
        metrics: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Sum values over every sample of a data set, each counted once. Collective.

        Args:
            compute_sums: (*batch) -> name -> scalar sum over the batch. A batch that is a mapping
                is given by its names.
            loader: a DataLoader or another source of batches; each batch is computed by one rank.
            models: models that `compute_sums` calls and that were not prepared, such as a moving
                average. These and all prepared models are in evaluation mode meanwhile.
            metrics: name -> metric of torchmetrics, or another object with `reset`, `update` and
                `compute`. `compute_sums` then returns what `update` takes, such as (scores, y),
                each with a row for every sample. All rows are kept in memory on every rank.

        Returns: name -> sum, and `samples`; or name -> what the metric's `compute` returns. The
            same bits at any number of ranks.
        """
        checks.check_evaluation("evaluate", compute_sums, loader, models)
        checks.check_metrics(metrics)
        with self._gathering.evaluation(), self._calls.during("run.evaluate"):
            evaluation = self._evaluation(loader, models)
            if metrics is not None:
                return evaluation.measure(compute_sums, metrics)
            return evaluation.evaluate(compute_sums)

    def predict(self, compute: Callable[..., Any], loader: Any, *models: nn.Module) -> Any:
        """Return values of every sample of a data set, in the order of the loader. Collective.

        Args:
            compute: (*batch) -> a tensor, or name -> tensor, with a row for each sample. Rows of
                all batches have one shape. A batch that is a mapping is given by its names.
            loader: as for `evaluate`.
            models: as for `evaluate`.

        Returns: the same of all samples, on the CPU and on every rank, whatever their number: what
            a metric takes that is no sum, such as the area under a curve.
        """
        checks.check_evaluation("predict", compute, loader, models)
        with self._gathering.evaluation(), self._calls.during("run.predict"):
            return self._evaluation(loader, models).predict(compute)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that calls the prepared models, outside of a step. Collective.

        A pipeline needs it, as the layers are on several ranks, and takes one call of each model as
        in a step. Shards (zero) need it for a method that calls layers, such as `model.decode(x)`.
        Else, and within `evaluate` and `predict`, the models may be called without it.

        Args: function, args, kwargs: the same on all ranks. It computes no gradients.

        Returns: what the function returns, on every rank.
        """
        outside_step = self._local_model().outside_step
        with self._calls.during("run.call"), torch.no_grad():
            try:
                return outside_step.call(function, *args, **kwargs)
            finally:
                outside_step.reshard()

    def _evaluation(self, loader: Any, models: tuple[nn.Module, ...]) -> OneEvaluation:
        local_model = self._local_model() if self._prepared.models else None
        models = (*self._prepared.models, *models)
        loader = loader.source if isinstance(loader, ShardedLoader) else loader  # has all samples
        return OneEvaluation(self.mesh.data, loader, models, self.to_device, local_model)

    def ema(self, decay: float) -> Ema:
        """Return the exponential moving average of the trainable weights. Called after `prepare`.

            ema = run.ema(0.999)
            ...
            optimizer.step()
            ema.update()
            ...
            with ema.in_place():
                sums = run.evaluate(compute_sums, loader)
                run.save("average.safetensors")

        It is part of `state`, and so of checkpoints: make it before `checkpoint.resume()`.

        Args: decay: in (0, 1), of the average in each step; smaller in the first ones.

        Raises: UsageError: there is one already, or `decay` is no such number.
        """
        checks.check_decay(decay, self._ema is not None)
        self._ema = Ema(self, decay)
        return self._ema

    def to_device(self, batch: Any) -> Any:
        """Return a nest of tensors on this rank's device.

        The loader still knows the batch by the new tensors, so `forward_backward` finds its size.
        """
        if not isinstance(batch, Tensor):
            return tree_map(batch, self.to_device)
        on_device = to_device(batch, self.device)
        self._prepared.sizes.track(batch, on_device)
        return on_device

    def share(self, batch: Any) -> Any:
        """Return this rank's rows of a global batch that every rank has made alike.

        For scripts without a loader. `forward_backward` knows the rows by their tensors.

        Args: batch: a nest of tensors whose dimension 0 is the batch, the same on all ranks.
        """
        return self._prepared.sizes.share(batch)

    def request_stop(self) -> None:
        """Ask all ranks to stop, with the next step's gradients. Safe in a signal handler."""
        self._stop_requested = True

    def stopping(self) -> bool:
        """Return True if any rank had asked to stop when the last step began.

        It is the same on every rank. The call waits for the device: on a GPU, not in each step.
        """
        return self.totals is not None and bool(self.totals[base.STOP] > 0)

    @contextmanager
    def outside_step(self, doing: str) -> Iterator[None]:
        """Return a context for work that belongs to no step, such as a save of your own.

        A trace shows that time under the name `doing`.
        """
        with own_progress().during(Phase.SAVE), self.mesh.recorder.during(ASIDE, doing):
            yield

    def end_trace(self) -> None:
        """Write the steps traced so far, if the run ends within the traced window. Collective."""
        if self._prepared.tracing is not None:
            self._prepared.tracing.finish()
