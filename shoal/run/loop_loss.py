"""A loss that the loop computes itself: `loss = F.cross_entropy(model(x), y); run.backward(loss)`.

      for x, y in loader:
          loss = F.cross_entropy(model(x), y)     the inputs of the first call tell the rows
          run.backward(loss)                      a step whose function returns that loss

Forward hooks note the calls of models. They are removed if the run's first loss is a function's.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from shoal.data.tree_map import mark_sample_lists, tensors_in
from shoal.errors import ShoalError, StrategyRefused, UsageError
from shoal.launch.failure import explanations
from shoal.platform.torch_private.pytree import tree_map
from shoal.platform.torch_private.tensor_state import in_function_transform
from shoal.run.batch_size import StepSizes
from shoal.run.checks import single_sample_error
from shoal.run.first_step_notes import ScriptCollectives
from shoal.run.guards.guarded_models import ModuleHook
from shoal.run.loop_watch import LoopWatch
from shoal.run.prepared import Prepared
from shoal.run.step import batch_of_size
from shoal.strategies import base
from shoal.strategies.local_step import split_microbatches
from shoal.strategies.loss_terms import LOOP_IN_PIPELINE, LOOP_IN_SERVERS, LOSS_AS_FUNCTION, Counted
from shoal.trial.called_models import ModelCall
from shoal.trial.loss_graph import LossGraphCheck

MOST_CALLS = 16
"""Calls of models whose inputs are kept until the backward pass."""
FIRST_LOSSES = 2
"""Losses for which the models are tried: those of a GAN take turns."""
NOTE = (
    "note: run.backward assumes that the loss is the mean over this rank's samples. It has looked "
    "at the loss's graph alone: shoal verify SCRIPT -n {ranks} proves it."
)
DRAWS = (
    " Dropout masks and noise by torch are others on each data rank, from the same distribution."
)
OWN_FIGURES = (
    "note: len(x), loss.item() * len(x), an accuracy: what the loop computes is of this rank's "
    "samples alone, 1 of {ranks} parts. run.backward returns {returned}; "
    'shoal.all_reduce(torch.tensor([hits, seen]), op="sum") is of all.'
)
GLOBAL_DRAWS = (
    'run.backward: draws="global" draws for the global batch inside of a step, and the loop has '
    f"drawn before it. Give the loss as a function: loss = {LOSS_AS_FUNCTION}, or use "
    'draws="rank".'
)
IN_PARTS = (
    "run.backward: accumulate={parts} computes each batch in {parts} micro-batches. Go through "
    "them: for x, y in run.microbatches((x, y)): run.backward(loss_fn(model(x), y)). Or give the "
    "loss as a function to run.forward_backward."
)
COUNTED = (
    "run.microbatches: the weight of a counted loss, and of a mean of ranks, is known when all "
    "micro-batches were counted. Give it as a function: run.forward_backward(compute_loss, *batch)."
)
GATHERED = (
    "run.gather inside of run.microbatches has the rows of one micro-batch, where one device "
    "compares those of the whole batch. Give the loss as a function, which gathers all rows before "
    "the step: run.forward_backward(compute_loss, *batch); or use accumulate=1."
)
ROWS_OF_A_PART = (
    "note: run.gather inside of run.microbatches returns the rows of one micro-batch of all ranks; "
    "before that loop it returns those of the whole batch."
)
NOT_CALLED = (
    "run.backward: no call of a prepared model was seen since the last step, so nothing has put "
    "{precision} around its forward pass. Calls of a compiled model and of methods are not seen. "
    f"Give the loss as a function: {LOSS_AS_FUNCTION}."
)
AFTER_FUNCTION = (
    "run.backward: the losses before came from functions, so the calls of this one were not "
    "watched, as shards and mixed precision need. Give it as a function too: "
    f"{LOSS_AS_FUNCTION}; or let run.backward take the first loss of the run."
)
IN_EVALUATION = (
    "run.backward: no prepared model was called in training mode since the last step, and shards "
    "are kept for the backward pass of such a call alone. Call model.train() before the loop: "
    "from_pretrained returns a model in evaluation mode. To train without dropout, give the loss "
    f"as a function: {LOSS_AS_FUNCTION}."
)
NO_GRADIENT = (
    "run.backward was given a loss that depends on no trainable parameter: is it detached, made of "
    "numbers, or computed under no_grad?"
)
ROWS = (
    "run.backward: the number of samples on this rank is not clear from the inputs of the models "
    "({why}). Say it: run.backward(loss, rows=len(x)); for micro-batches there is "
    "run.microbatches(batch)."
)
OF_THIS_RANK = (
    "shoal: this rank has {rows} samples, of {whole} in the batch. Code that knows the size of a "
    "whole batch (a reshape, a target, a state for each sample) must take it from its tensors: "
    "len(x)."
)
"""Note on an error that speaks of as many as a whole batch has."""
UNKNOWN = (
    "run.microbatches: the batch comes from no prepared loader and no run.share, so no rank knows "
    "how many samples the others have. Use one of them, or run.forward_backward."
)


class LoopLoss:
    """The calls of models in a loop that computes its own loss, and its batch and micro-batches.

    Attributes:
        refuses_global_draws: False under `shoal verify`, which asks for them in any script.
        watches: calls of the models are noted.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.refuses_global_draws = True
        self._prepared = prepared
        self._phase = prepared.guards.phase
        self._autocast = prepared.settings.autocast
        self.watches = False
        self._losses = 0
        # Calls of models since the last loss, for the first losses of the run.
        self._first_calls: list[ModelCall] = []
        self._hooks: dict[nn.Module, list[Any]] = {}
        # Hooks of submodules: a method of a model may call `self.blocks[0]` or `self.net.forward`.
        self._hooks_below: list[Any] = []
        self._inner_depth = 0
        # The autocast contexts of nested calls of models; None without autocast.
        self._contexts: list[torch.autocast | None] = []
        # Inputs of models since the last step.
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=MOST_CALLS)
        # Inputs of submodules that a method of a model has called.
        self._inner_calls: deque[tuple[Any, ...]] = deque(maxlen=MOST_CALLS)
        # Inputs of the step whose loss is checked now.
        self._inputs: list[tuple[Any, ...]] = []
        self._microbatch: base.LocalBatch | None = None
        self._collectives = ScriptCollectives(prepared)
        self._is_noted = False
        self._graph_check = LossGraphCheck(
            prepared.mesh.data,
            prepared.guards.enabled,
            prepared.settings.accumulate,
            prepared.note_once,
            lambda: {id(p) for model in prepared.models for p in model.parameters()},
            lambda: prepared.mesh.tensor.size == 1 and not prepared.local_model().is_divided,
        )
        self._phase.add_gradients = self._graph_check.add_gradients
        explanations.append(partial(_explain_size, ref(prepared.watch)))  # a run may end earlier

    def watch(self) -> None:
        """Note the calls of the prepared models from now on."""
        self.watches = True
        self._prepared.local_model().outside_step.hold(True)
        for model in self._prepared.models:
            if model not in self._hooks and any(p.requires_grad for p in model.parameters()):
                # Perhaps that of another fold: its first losses are looked at too.
                self._losses = 0
                self._graph_check.restart()
                self._hooks[model] = [
                    model.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True),
                    model.register_forward_hook(
                        ModuleHook(self._after), with_kwargs=True, always_call=True
                    ),
                ]
                # A script may call a method in place of the model, as for an actor and its critic.
                for child in () if isinstance(model, nn.Sequential) else model.children():
                    before, after = ModuleHook(self._before_inner), ModuleHook(self._after_inner)
                    self._hooks[model] += [
                        child.register_forward_pre_hook(before, with_kwargs=True),
                        child.register_forward_hook(after, with_kwargs=True, always_call=True),
                    ]
                self._watch_below(False)
                self._watch_below(self._graph_check.is_due())

    def _watch_below(self, begins: bool) -> None:
        """Note the outputs of submodules, in steps in which the loss's graph is compared."""
        if not begins:
            for hook in self._hooks_below:
                hook.remove()
            self._hooks_below = []
        elif not self._hooks_below:
            for model in self._hooks:
                watched = {model, *(() if isinstance(model, nn.Sequential) else model.children())}
                for module in model.modules():
                    if module not in watched:
                        enter, leave = ModuleHook(self._enter), ModuleHook(self._leave)
                        self._hooks_below += [
                            module.register_forward_pre_hook(enter),
                            module.register_forward_hook(leave, with_kwargs=True, always_call=True),
                        ]

    def before_function(self) -> None:
        """End what calls of models have begun: this loss comes from a function. Collective.

        If no loss of the run was the loop's, calls are noted no longer.
        """
        outside_step = self._prepared.local_model().outside_step
        outside_step.hold(False)
        self._calls.clear()
        self._inner_calls.clear()
        self._collectives.watch(False)
        self._first_calls = []
        self._graph_check.begin_step()
        if self._is_noted:
            outside_step.hold(True)
            return
        self.watches = False
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks = {}
        self._watch_below(False)

    def make_batch(self, loss: Any, rows: int | None, reduction: str) -> base.LocalBatch:
        """Return the batch of a step whose loss is there. Collective.

        Args:
            loss: a scalar tensor, the mean over this rank's samples, or a `Counted`.
            rows: samples on this rank; None to tell it from the inputs of the models.
            reduction: "rows", or "ranks" for the mean of the ranks' means.

        Raises:
            StrategyRefused: the loss must be a function here.
            UsageError: the same.
        """
        self._check(loss, reduction)
        calls = [*self._calls]
        inputs = [*calls, *self._inner_calls]
        self._inputs = inputs if self._prepared.watch.enabled else []
        self._collectives.watch(False)
        self._calls.clear()
        self._inner_calls.clear()
        if self._autocast is not None and self.watches and not calls:
            raise UsageError(NOT_CALLED.format(precision=self._autocast))
        prepared = self._prepared
        self.watch()
        is_first = not self._is_noted
        if is_first:
            self._is_noted = True
            note, has_data_ranks = NOTE, prepared.mesh.data.size > 1
            note += DRAWS if has_data_ranks else ""
            prepared.announce(note.format(ranks=max(2, prepared.mesh.size)))
            if has_data_ranks:
                prepared.announce(self._own_figures())
        compute_loss = base.ComputedLoss(loss)
        if self._microbatch is not None:
            micro, self._microbatch = self._microbatch, None
            step = micro.step._replace(compute_loss=compute_loss)
            return micro._replace(step=step, args=(), is_last_microbatch=True)
        batch = self._batch(compute_loss, rows, calls or [()])
        prepared.watch.note_host_draws(batch.num_samples)
        if is_first and not batch.step.sizes_known:
            share = 0 if prepared.watch.yielded is None else prepared.watch.yielded.rows
            rows = batch.num_samples
            prepared.sizes.note_same_rows(calls, prepared.announce, rows, share)
        return batch

    def check(self, batch: base.LocalBatch) -> None:
        """Compare the graph of a loss that is there with those of other ranks. Collective.

        Raises: UsageError: the loss is no mean over samples, or one of samples that are mixed.
        """
        prepared = self._prepared
        inputs, self._inputs = self._inputs, []
        if not prepared.local_model().strategy_state.is_synchronous:
            return
        # torch.cat of two views of a batch has twice the rows of the batch that the loader yielded.
        yielded = prepared.watch.yielded
        samples = batch.num_samples
        if not batch.step.sizes_known:
            samples = yielded.rows if yielded is not None else 0
        loss = batch.step.compute_loss()
        self._graph_check.compare(loss, batch.num_samples, samples, [*tensors_in(inputs)])
        self._watch_below(self._graph_check.is_due())
        prepared.watch.judge_loss(inputs, loss)

    def take_first_calls(self) -> list[ModelCall] | None:
        """Return the calls of models behind one of the run's first losses; None for a later loss.

        To be called for each loss. Of micro-batches, two are compared before a model is tried.
        """
        self._losses += 1
        calls, self._first_calls = self._first_calls, []
        begins = 1 if self._prepared.settings.accumulate == 1 else FIRST_LOSSES
        return calls if begins <= self._losses <= FIRST_LOSSES else None

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of a local batch; `Run.microbatches` explains it."""
        prepared = self._prepared
        batch = mark_sample_lists(batch, prepared.sizes.hold_samples)
        full = self._batch(base.ComputedLoss(None), None, [(batch,)])
        parts = prepared.settings.accumulate
        if parts > 1:
            self._graph_check.begin_step()
        if parts > 1 and not full.step.sizes_known:
            raise UsageError(UNKNOWN)
        if parts > 1 and prepared.local_model().remote_optimizer is not None:
            raise UsageError(LOOP_IN_SERVERS)
        # Each of them is summed over the ranks, so all ranks have as many.
        most = -(-full.step.global_batch_size // prepared.mesh.data.size)
        microbatches = split_microbatches(full._replace(args=(batch,)), parts, most)
        for number, micro in enumerate(microbatches):
            self._microbatch = micro
            yield micro.args[0]
            if self._microbatch is not None:
                self._microbatch = None
                raise UsageError(
                    f"run.microbatches: no run.backward(loss) was called for micro-batch {number}, "
                    "so its gradient would be missing."
                )

    def check_gather(self, rows: Tensor) -> None:
        """Raise UsageError for rows of a loss of a micro-batch; note others."""
        if self._microbatch is None or self._prepared.settings.accumulate == 1:
            return
        if rows.requires_grad:
            raise UsageError(GATHERED)
        self._prepared.note_once(ROWS_OF_A_PART)

    def _batch(
        self, compute_loss: base.ComputeLoss, rows: int | None, calls: Sequence[tuple[Any, ...]]
    ) -> base.LocalBatch:
        """Return the batch of a step. Args: calls: inputs, of which some are the batch."""
        self._prepared.sizes.check_shared()
        sizes = self._sizes(rows, calls)
        return batch_of_size(compute_loss, (), {}, sizes, self._prepared.mesh.data)

    def _sizes(self, rows: int | None, calls: Sequence[tuple[Any, ...]]) -> StepSizes:
        """Return the samples of the batch that the models were called with.

        A loop may call them with other tensors too, such as a choice of the samples.
        """
        sizes = self._prepared.sizes
        tried = calls[::-1]
        if len(calls) > 1:  # what a model computed for another one is no batch, though it may fit
            tried = sorted(tried, key=sizes.are_known, reverse=True)
        for inputs in tried:
            try:
                found = sizes.resolve(inputs, rows)
                break
            except UsageError:
                continue
        else:
            shapes = [str(tuple(t.shape)) for inputs in calls for t in first_tensors(inputs)]
            why = f"of shapes {', '.join(shapes)}" if shapes else "no call with tensors was seen"
            raise UsageError(ROWS.format(why=why))
        lengths = {len(t) for inputs in calls for t in first_tensors(inputs)}
        if rows is None and found.is_known:
            sizes.check_weights(calls)
        if rows is None and not found.is_known and len(lengths) > 1:
            raise UsageError(ROWS.format(why=f"their lengths are {sorted(lengths)}"))
        return found

    def _check(self, loss: Any, reduction: str) -> None:
        """Raise if `loss` is none, or must be a function under these settings."""
        if not isinstance(loss, Tensor | Counted) or (isinstance(loss, Tensor) and loss.dim()):
            shape = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise UsageError(
                f"run.backward takes a loss, a scalar tensor with a gradient or shoal.counted(sum, "
                f"count), and was given a {shape or type(loss).__name__}."
            )
        mesh, settings = self._prepared.mesh, self._prepared.settings
        if mesh.pipeline.size > 1:
            raise StrategyRefused(LOOP_IN_PIPELINE)
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise UsageError(NO_GRADIENT)
        local_model = self._prepared.local_model()
        if not self.watches and (self._autocast is not None or local_model.has_sharded_params):
            raise UsageError(AFTER_FUNCTION)
        outside_step = local_model.outside_step
        if outside_step.hold is not base.no_op and self.watches and not outside_step.is_held():
            raise UsageError(IN_EVALUATION)
        if settings.draws == "global" and mesh.data.size > 1 and self.refuses_global_draws:
            raise UsageError(GLOBAL_DRAWS)
        if settings.accumulate > 1 and self._microbatch is None:
            raise UsageError(IN_PARTS.format(parts=settings.accumulate))
        if settings.accumulate > 1 and (isinstance(loss, Counted) or reduction != "rows"):
            raise UsageError(COUNTED)

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call of a model, and begin autocast."""
        if torch.compiler.is_compiling():
            return
        is_of_loop = not self._phase.in_passes and torch.is_grad_enabled()
        context = None
        if is_of_loop:
            self._prepared.watch.end()  # of what the loop does before it calls a model
            self._collectives.watch(self._graph_check.is_early_step())
            if not in_function_transform():
                self._calls.append((*args, *kwargs.values()))
        if is_of_loop and self._autocast is not None:
            context = torch.autocast(self._prepared.mesh.device.type, self._autocast)
            context.__enter__()
        self._contexts.append(context)

    def _before_inner(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call of a submodule from outside of its model's `forward`."""
        if self._is_outer_call():
            self._prepared.watch.end()
            self._collectives.watch(self._graph_check.is_early_step())
            self._inner_calls.append((*args, *kwargs.values()))
        self._enter(module, args)

    def _after_inner(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._leave(module, args, kwargs, output)
        if self._is_outer_call():
            self._prepared.watch.follow((args, kwargs), output)

    def _enter(self, _: nn.Module, args: Any) -> None:
        self._inner_depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inner_depth = max(self._inner_depth - 1, 0)  # a call may have begun before the hooks
        if self._is_outer_call():
            self._add_output(ModelCall(module, args, kwargs, output))
        elif self._is_outer_call(models=1):
            self._graph_check.add_outputs(output, is_inner=True)

    def _add_output(self, call: ModelCall) -> None:
        """Note what a model has returned, or a module that a method of a model has called."""
        self._graph_check.add_outputs(call.output)
        is_kept = self._losses < FIRST_LOSSES and len(self._first_calls) < MOST_CALLS
        if is_kept and torch.is_grad_enabled():
            self._first_calls.append(call)

    def _is_outer_call(self, models: int = 0) -> bool:
        """Return True outside of other calls. Args: models: calls of models that do not count."""
        return not (
            len(self._contexts) > models
            or self._inner_depth
            or self._phase.in_passes
            or torch.compiler.is_compiling()
            or in_function_transform()
            or not torch.is_grad_enabled()
        )

    def _own_figures(self) -> str:
        """Return the note on figures that the loop computes of this rank's samples."""
        is_synchronous = self._prepared.local_model().strategy_state.is_synchronous
        returned = "the mean loss over all" if is_synchronous else "that of this rank too"
        if self._prepared.settings.accumulate > 1:
            returned = "the part of a micro-batch, and those of a batch add up to its mean loss"
        return OWN_FIGURES.format(ranks=self._prepared.mesh.data.size, returned=returned)

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End autocast. Return the output in float32, for a loss outside of it."""
        if torch.compiler.is_compiling():
            return None
        # Empty in a call that has begun before calls were noted.
        context = self._contexts.pop() if self._contexts else None
        is_watched = not (self._phase.in_passes or in_function_transform())
        if is_watched:
            self._add_output(ModelCall(model, args, kwargs, output))
        if context is not None:
            context.__exit__(None, None, None)
            output = output if any(self._contexts) else tree_map(_in_float32, output)
        if is_watched and not self._contexts and torch.is_grad_enabled():
            self._prepared.watch.follow((args, kwargs), output)
        return output


def first_tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the first tensor with rows of some values, in a list; an empty list without one."""
    return [value for value in values if isinstance(value, Tensor) and value.dim()][:1]


def _in_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
        return value.float()
    return value


def _explain_size(watch: ref[LoopWatch], error: BaseException, _line: str) -> BaseException | None:
    """Return a better error of a BatchNorm that was given one sample of several, or add a note to
    an error of the loop that speaks of the size of a whole batch.
    """
    share = None if (seen := watch()) is None else seen.yielded
    if share is None or isinstance(error, ShoalError) or hasattr(error, "__notes__"):
        return None
    if share.global_rows > 1 and (found := single_sample_error(error, share.rows)):
        return found
    numbers = re.findall(r"\d+", str(error))
    if 0 < share.rows < share.global_rows and str(share.global_rows) in numbers:
        error.add_note(OF_THIS_RANK.format(rows=share.rows, whole=share.global_rows))
    return None
