"""The contract of all strategies: functions from `LocalModel` to `LocalModel`.

A `LocalModel` is what one rank holds, and how it takes a step. Each step has four phases:

      batch ──> run ──────> reduce_gradients ──> optimizer.step ──> gather_params
                forward     gradients become     each rank steps    new values reach
                backward    global means         what it owns       all ranks that read them

`single_device` (`single.py`) makes the local model of a world of one rank: the full model, and no
communication. `apply_strategies` then applies the strategies of a run, one after the other:

      single_device(module) ──> Pipeline.apply ──> TensorParallel.apply ──> Ddp.apply ──> LocalModel
                                keeps its stage    keeps its shards         adds the all-reduce

A strategy replaces some fields of the local model and leaves the others. It never asks which other
strategies there are. Facts that it must know about earlier ones are fields too, such as
`PassTraits.collective_forward`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.strategies.full_model import FullModel
from shoal.strategies.grad_checks import FiniteCheck
from shoal.strategies.options import StrategyOptions
from shoal.strategies.state import STATELESS, RemoteOptimizer, StrategyState
from shoal.weights.deferred_init import DeferredWeights


@dataclass(frozen=True)
class PassTraits:
    """Facts about the passes of a step through the module."""

    collective_forward: bool = False
    """A forward pass is collective: every rank must make as many as the others."""
    autocast: torch.dtype | None = None
    """Dtype of the forward pass under mixed precision; None without."""
    recomputes: bool = False
    """Some modules compute again in the backward pass, with the weights that they have then."""


@dataclass(frozen=True)
class PipelineTraits:
    """How this rank's layers lie in a pipeline. The default is a model in one piece."""

    axis: Axis | None = None
    """Axis of the ranks that hold the other stages. None if this rank has all layers."""
    num_microbatches: int = 1
    """Micro-batches of a local batch."""
    full_model: FullModel | None = None
    """The full model, of which `LocalModel.module` has one or more stages."""
    duplicated_params: Set[str] = frozenset()
    """Names of owned parameters that an earlier rank of `axis` owns too. Their gradients are
    equal, so sums over the axis must count them once.
    """
    tied_names: Mapping[str, str] = field(default_factory=dict)
    """Name in `LocalModel.module` -> name in the full model, for tied parameters. A stage may hold
    such a parameter only under its second name.
    """


def plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the models: nothing is to be done around it."""
    return function(*args, **kwargs)


def no_op(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class OutsideStep:
    """Needs of the models outside of training steps. The default needs nothing."""

    call: Callable[..., Any] = plain_call
    """Call (function, *args, **kwargs): the function may call the models, for example to evaluate
    them. Every rank of a collective forward pass must make the call.
    """
    reshard: Callable[[], None] = no_op
    """Free the parameters that a forward pass without a backward pass has gathered."""
    whole_models: Callable[[], AbstractContextManager[bool]] | None = None
    """Return a context in which this rank may run the models without the others; it yields False
    if it cannot. Collective. None if nothing is to be done for that, or nothing can be."""
    hold: Callable[[bool], None] = no_op
    """Let the forward pass that a call of a model begins outside of a step last until the backward
    pass of the next step: True. False: it ends with that call.
    """
    is_held: Callable[[], bool] = bool
    """Return True while such a forward pass lasts."""
    settle_gradients: Callable[[], None] = no_op
    """Set gradients of this rank to None where the script has set those of its models to None."""
    close: Callable[[], None] = no_op
    """Make the models what they were, before the strategies are applied again. Collective."""


NEEDS_NOTHING = OutsideStep()
"""The needs of models in one piece, on one rank."""


ComputeLoss = Callable[..., Any]
"""The user's function of a batch: (*args, **kwargs) -> loss or (loss, extra).

It calls the prepared models in any way. A loss is a scalar tensor, the mean over its samples, or
`loss_terms.Counted`.
"""


class LossWrapper:
    """A function that is called in the place of a `ComputeLoss`, which it calls itself.

    Args:
        compute_loss: the user's function.
        call: takes the same arguments.
        purpose: what tells it from other functions around the same one; the same on all ranks.
    """

    def __init__(self, compute_loss: ComputeLoss, call: Callable[..., Any], purpose: str) -> None:
        self.__wrapped__ = compute_loss  # as `inspect.unwrap` looks for it
        self._call = call
        self.purpose = purpose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@dataclass(frozen=True)
class ComputedLoss:
    """A `ComputeLoss` without arguments whose loss is there already, of one micro-batch."""

    loss: Any

    def __call__(self) -> Any:
        return self.loss


LOSS_SUM, COUNT, STOP, SUMMED = 0, 1, 2, 3
"""Indices into the totals of a step. Values marked by `loss_terms.summed` begin at SUMMED."""
TOTALS_LENGTH = 16
"""Length of the totals: loss sum, count, stop requests, up to 12 summed values, gradients that are
not finite."""
NONFINITE = TOTALS_LENGTH - 1
"""Index of a number above 0 if a rank has found a gradient that is not finite before it sent it."""
MAX_SUMMED = NONFINITE - SUMMED
"""Numbers that `loss_terms.summed` can mark in a step."""


class Step(NamedTuple):
    """One call of `forward_backward` on this rank: the same for all micro-batches of it."""

    compute_loss: ComputeLoss
    """The user's function."""
    global_batch_size: int
    """Samples over all ranks and micro-batches."""
    sizes_known: bool = True
    """False if no loader has made the batch, so that no rank knows the `global_batch_size`. Any
    number stands there then, and a mean is taken as a sum and its number of samples.
    """
    loss_weight: float | None = None
    """Factor of this rank's mean loss, where each rank is to count as much as every other one,
    whatever its number of samples. None: the loss is the mean over all samples.
    """
    of_microbatch: Callable[[int], ComputeLoss] | None = None
    """Returns the function of a micro-batch, by its number, where each has one of its own. None:
    `compute_loss` is that of all.
    """
    sum_counts: Callable[[Tensor], Tensor] | None = None
    """Sums counts over the ranks of the data axis, for losses of several terms. Collective. None
    if the loss of this rank counts alone.
    """
    note_loss: Callable[[Tensor], None] | None = None
    """Takes the loss of each micro-batch of this rank, detached. None: nobody asks for it."""


class LocalBatch(NamedTuple):
    """The samples of a global batch that one rank computes, or a micro-batch of them."""

    step: Step
    """The step that they are of."""
    args: tuple[Any, ...]
    """Positional arguments of the function: nests of tensors. Dimension 0 is the batch."""
    kwargs: Mapping[str, Any]
    """Keyword arguments of the function, of the same kind."""
    num_samples: int
    """Samples in this batch. 0 marks a stand-in: one sample of weight 0, so that a rank without
    samples takes part in all collectives.
    """
    first_row: int = 0
    """Index of the first sample within the global batch, if the sizes are known."""
    microbatch: int = 0
    """Number of this micro-batch in the step, from 0; that of the part of which it is one, until it
    is split last."""
    is_last_microbatch: bool = True
    """True for the last micro-batch of a step. Gradients are reduced after it."""
    stop_requested: bool = False
    """True if this rank was asked to stop after the step, by a signal for example."""
    grad_weight: float = 1.0
    """Factor of the loss and of the totals. A strategy that averages over n ranks sets n."""
    previous_totals: Tensor | None = None
    """(TOTALS_LENGTH,), summed over the earlier micro-batches of this step; None for the first."""
    stage: int = 0
    """The pipeline stage whose forward pass is to run; 0 without a pipeline."""
    values: tuple[Tensor, ...] = ()
    """Activations that the previous pipeline stage has sent; empty for stage 0."""

    @property
    def function(self) -> ComputeLoss:
        """The function that computes the loss of these samples."""
        of_microbatch = self.step.of_microbatch
        return self.step.compute_loss if of_microbatch is None else of_microbatch(self.microbatch)


class Extra(NamedTuple):
    """Values beside the loss that `compute_loss` has returned for a micro-batch."""

    num_samples: int
    """Samples of the micro-batch; 0 for a stand-in."""
    value: Any
    """A nest with detached tensors, and `loss_terms.Summed` where the sum over ranks belongs."""


class ForwardOutput(NamedTuple):
    """The result of a forward pass."""

    loss: Tensor
    """Scalar with an autograd graph. The backward pass begins here."""
    step_totals: Tensor
    """(TOTALS_LENGTH,), detached, of this rank. Includes `LocalBatch.previous_totals`."""
    is_sum_and_count: bool
    """True if the loss is one sum with a count. Gradients are then still to be rescaled by the
    global count: see `local_step.rescale_by_count`.
    """
    extra: Extra | None = None
    """Values beside the loss, if there are any."""
    totals_param: Tensor | None = None
    """(TOTALS_LENGTH,), a parameter whose gradient is to become `step_totals`, so that an engine
    which reduces gradients reduces the totals too. None for other engines.
    """
    values: tuple[Tensor, ...] = ()
    """Activations for the next pipeline stage. Empty for the last stage, which has a loss."""


Forward = Callable[[LocalBatch], ForwardOutput]


class StepResult(NamedTuple):
    """The result of the forward and backward passes of a step."""

    step_totals: Tensor
    """(TOTALS_LENGTH,), summed over all ranks if the last micro-batch was among them."""
    is_sum_and_count: bool
    """As in `ForwardOutput`."""
    extras: tuple[Extra, ...] = ()
    """Values beside the loss, of every micro-batch of this call."""


class ExampleBatch(NamedTuple):
    """The first batch of a run, for strategies that trace or measure the model."""

    compute_loss: ComputeLoss
    args: tuple[Any, ...]
    """Positional arguments of `compute_loss`, with a few samples."""
    kwargs: Mapping[str, Any]
    """Keyword arguments of `compute_loss`, with as many samples."""
    num_samples: int
    """Samples of a complete batch on this rank."""
    called_models: Set[nn.Module]
    """Prepared models that `compute_loss` calls on this batch, and not inside of another one."""


@dataclass(frozen=True)
class LocalModel:
    """The model that one rank holds, and how it takes a step.

    Parameter names are those of the full model, on every rank.
    """

    module: nn.Module
    """The layers of this rank, or its shards of them."""
    forward: Forward
    """Compute `compute_loss` of one micro-batch, and its weighted loss."""
    run: Callable[[Forward, LocalBatch], StepResult]
    """Compute the forward and backward passes of a batch; fills `.grad`. The first argument is the
    forward function to use, so that a caller can wrap it.
    """
    trainable_params: dict[str, nn.Parameter]
    """Parameters that this rank's optimizer steps, by name. This rank *owns* them."""
    reduce_gradients: Callable[[], None] = no_op
    """Turn the gradients of owned parameters into global means, or wait until they are."""
    gather_params: Callable[[], None] = no_op
    """Bring new values to all ranks that read them, or wait until they are there."""
    strategy_state: StrategyState = STATELESS
    """State that the strategy itself keeps from step to step, for checkpoints."""
    outside_step: OutsideStep = NEEDS_NOTHING
    """Needs of the models when they are called outside of steps."""
    pass_traits: PassTraits = field(default_factory=PassTraits)
    """Facts about the passes that `forward` and `run` make through `module`."""
    pipeline: PipelineTraits = field(default_factory=PipelineTraits)
    """How `module` lies in a pipeline."""
    example: ExampleBatch | None = None
    """The first batch; None for strategies that are applied before there is one."""
    weights: DeferredWeights | None = None
    """Weights of the model that have no memory yet; None if all have."""
    finite_check: FiniteCheck = field(default_factory=FiniteCheck)
    """Looks for values that are not finite. All local models of a run share one."""
    summary_lines: tuple[str, ...] = ()
    """Lines for the beginning of a run: which layers are divided, and how."""

    @property
    def remote_optimizer(self) -> RemoteOptimizer | None:
        """The optimizer in other processes that steps `trainable_params`.

        There is no `.grad` on this rank after a backward pass then. None if this rank steps.
        """
        return self.strategy_state.remote_optimizer

    def renew_params(self, instead: Mapping[str, nn.Parameter] | None = None) -> None:
        """Take what `module` has now in the places of the trainable parameters.

        All local models share the dict. Later ones refer to earlier ones, which would hold the
        memory of whole parameters.

        Args: instead: by name, parameters that take the places of those of the module.
        """
        aliases = self.pipeline.tied_names
        named = {aliases.get(name, name): p for name, p in self.module.named_parameters()}
        for name in self.trainable_params:
            self.trainable_params[name] = (instead or {}).get(name, named[name])

    @property
    def is_partial(self) -> bool:
        """True if other ranks hold other layers of the model. This rank may train none.

        Gradients and totals are complete only after `run` has returned then, because `run` makes
        many passes through parts of `module`, in any order, and records them in a trace. Else it
        makes one forward and one backward pass for each micro-batch, totals are complete after the
        forward pass, and each gradient is complete when it arrives.
        """
        return self.pipeline.axis is not None

    @property
    def has_sharded_params(self) -> bool:
        """True if an owned parameter is a DTensor, of which this rank holds a shard."""
        return any(isinstance(parameter, DTensor) for parameter in self.trainable_params.values())

    @property
    def is_divided(self) -> bool:
        """True if this rank holds a part of the model: some layers, or shards."""
        return self.is_partial or self.has_sharded_params


class Strategy(StrategyOptions, ABC):
    """A way to train on many ranks. Every strategy derives from this class.

    The options of a strategy are its fields.

    Attributes:
        needs_helper_processes: it starts processes beside the ranks.
        needs_example_batch: it needs `LocalModel.example`: it applies before all others, when the
            first batch is there.
        can_apply_again: it leaves whole parameters in their places on every rank, so that it can be
            applied anew after `OutsideStep.close`.
        takes_empty_weights: it may be applied to weights that have no memory yet: it reads no
            values, or fills what this rank needs by `LocalModel.weights`. Others find all filled.
    """

    needs_helper_processes: ClassVar[bool] = False
    needs_example_batch: ClassVar[bool] = False
    can_apply_again: ClassVar[bool] = False
    takes_empty_weights: ClassVar[bool] = False

    @abstractmethod
    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Return the local model that this strategy makes of `model`.

        Collective: every rank of the mesh calls it.
        """

    def cost(self, step: StepCost) -> StepCost:
        """Return what a step costs with this strategy, given what it costs without. Needs no ranks.

        `shoal plan` calls it in the order in which strategies apply, with a model without memory.

        Raises: StrategyRefused: the strategy cannot take the model, or tells no costs.
        """
        raise StrategyRefused(
            f"{type(self).__name__} does not tell its costs: it has no method `cost`."
        )

    @property
    def deviations(self) -> list[str]:
        """Sentences for the beginning of a run: how numbers differ from those of one device."""
        return []


def apply_strategies(model: LocalModel, strategies: Iterable[Strategy], mesh: Mesh) -> LocalModel:
    """Apply strategies to a local model, one after the other. Collective."""
    for strategy in strategies:
        if not strategy.takes_empty_weights:
            model = _with_all_weights(model)
        model = strategy.apply(model, mesh)
    return _with_all_weights(model)


def _with_all_weights(model: LocalModel) -> LocalModel:
    """Fill the weights that have no memory. Sends nothing: strategies compare ranks."""
    if model.weights is not None:
        model.weights.fill([model.module])
        model.renew_params()
    return replace(model, weights=None)
