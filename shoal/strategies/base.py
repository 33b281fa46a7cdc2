"""The one idea: every strategy is a function `Part -> Part`, and every step is run, reduce, step,
gather.

    batch ──> run ──────> reduce ─────> step ──────────> gather
              forward     gradients     the owner's      new values reach
              backward    are global    optimizer        every rank that
                          means                          reads them

A `Part` is what one rank holds. `whole` makes the part of a world of one; `cut` folds strategies
over it, in the order that they are given. A strategy says which of the fields it replaces and never
looks at another strategy: what it has to know of one that was applied before is a fact of the part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.comm.norm import global_norm, to_local
from shoal.errors import UsageError
from shoal.platform.torch_private.kernels import foreach_mul_
from shoal.strategies.colocation import Colocation, ColocationRequest
from shoal.strategies.full_model import FullModel
from shoal.strategies.options import StrategyOptions
from shoal.strategies.remote_optimizer import RemoteOptimizer
from shoal.strategies.state import STATELESS, StrategyState

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(output, target) -> the mean over the batch, or (sum, count) where samples weigh differently."""
Measure = Callable[[Any, Any], Tensor]
"""(output, target) -> 1-D tensor of sums over the batch, detached; summed over all ranks."""

LOSS_SUM, COUNT, STOP, MEASURED = 0, 1, 2, 3
"""Where things stand in the totals of a step; measures begin at MEASURED."""
TOTALS_LENGTH = 16
"""Length of the totals: loss sum, count, stop requests, up to 13 measures, and zeros."""


class LocalBatch(NamedTuple):
    """One rank's share of a global batch, or a micro-batch of that share."""

    loss_fn: LossFunction
    inputs: tuple[Any, ...]
    target: Any
    # samples in this share; 0 marks a stand-in sample, there only so that every rank takes part
    num_samples: int
    global_batch_size: int  # samples in the global batch
    measure: Measure | None = None
    stop_requested: bool = False  # this rank was asked to stop
    grad_weight: float = (
        1.0  # multiplies objective and totals; a strategy that averages over n ranks asks for n
    )
    previous_totals: Tensor | None = None  # totals of the micro-batches that came before this one
    is_last_microbatch: bool = (
        True  # the last micro-batch of the step: gradients are reduced after it
    )
    stage: int = 0  # of a pipeline, whose forward pass is wanted
    values: tuple[Tensor, ...] = ()  # what the stage before it sends


class ForwardOutput(NamedTuple):
    """What a forward pass gives."""

    loss: Tensor  # scalar with a graph: what is differentiated
    step_totals: Tensor  # (SLOTS,), detached
    is_sum_and_count: (
        bool  # the loss counted for itself: gradients are still to be divided by the global count
    )
    totals_param: Tensor | None = None  # gets the totals as its gradient
    values: tuple[
        Tensor, ...
    ] = ()  # what a stage of a pipeline sends to the next; the last one has an objective


Forward = Callable[[LocalBatch], ForwardOutput]


class StepResult(NamedTuple):
    """What a step gives."""

    step_totals: Tensor  # (SLOTS,), over all ranks after the last micro-batch
    is_sum_and_count: bool


class ExampleBatch(NamedTuple):
    """What the model will be called with, as far as a loader tells."""

    inputs: tuple[Any, ...]  # a few samples
    num_samples: int  # samples of a whole batch on this rank


@dataclass(frozen=True)
class PassTraits:
    """Facts about the way in which `forward` and `run` of a part go through its module.

    Attributes: module_called: `forward` calls `module` itself. Otherwise it calls modules inside,
        one by one. complete_after_run: gradients and totals are complete only when `run` has
        returned, for it
            makes many passes through parts of `module`, in any order. Otherwise it makes one
            forward and one backward pass for each micro-batch: totals are complete after the
            forward pass, and each gradient is as soon as it arrives.
        recorded: `run` puts its own passes into a trace.
    """

    module_called: bool = True
    complete_after_run: bool = False
    recorded: bool = False


@dataclass(frozen=True)
class LocalModel:
    """What one rank holds, and how it takes a step."""

    module: nn.Module
    """Its layers, or its slices of them."""
    forward: Forward
    """One micro-batch through `module` and the loss."""
    run: Callable[[Forward, LocalBatch], StepResult]
    """Forward and backward; fills `.grad`."""
    trainable_params: Mapping[str, nn.Parameter]
    """What this rank's optimizer steps, under whole-model names."""
    reduce_gradients: Callable[[], None]
    """Owned gradients become global means, or the wait for it."""
    gather_params: Callable[[], None]
    """New values reach every rank that reads them, or the wait for it."""
    reshard: Callable[[], None] = lambda: None
    """Lets go of what a forward pass without a backward pass has gathered."""
    collective_forward: bool = False
    """A forward pass is collective: every rank must make as many as the others."""
    grads_not_ready_reason: str = ""
    """Why an owned `.grad` cannot be used as soon as it is accumulated; empty where it is the
    global mean by then.
    """
    maybe_unused: Set[str] = frozenset()
    """Names of owned parameters whose `.grad` may be taken away again by `reduce`; known as
    they get it.
    """
    remote_optimizer: RemoteOptimizer | None = None
    """Who really owns `owned`, where that is another process; there is no `.grad` here after a
    backward pass.
    """
    strategy_state: StrategyState = STATELESS
    """What the strategy itself keeps from step to step."""
    example_inputs: ExampleBatch | None = None
    """What the model will be called with; None where there is no loader."""
    pipeline_axis: Axis | None = None
    """Ranks that hold other parts of the model, as the stages of a pipeline do: `module` and
    `owned` are a part.
    """
    full_model: FullModel | None = None
    """The whole model, where `line` has parts of it."""
    colocations: tuple[ColocationRequest, ...] = ()
    """Requests of strategies that apply later for modules in one stage of a pipeline."""
    duplicated_params: Set[str] = frozenset()
    """Names of owned parameters that a rank further up the line owns too: with equal gradients,
    to be counted once.
    """
    tied_names: Mapping[str, str] = field(default_factory=dict)
    """Names in `module` of parameters that the whole model calls otherwise: another name of a
    tied one is left here.
    """
    passes: PassTraits = PassTraits()
    """How `forward` and `run` go through `module`."""
    summary_lines: tuple[str, ...] = ()
    """Lines about what was cut how, for the beginning of a run."""

    @property
    def is_partial(self) -> bool:
        """True where other ranks hold other layers of the model; this rank may train none."""
        return self.pipeline_axis is not None

    @property
    def has_sharded_params(self) -> bool:
        """True where an owned parameter is a DTensor, of which this rank holds a slice."""
        return any(isinstance(parameter, DTensor) for parameter in self.trainable_params.values())


class Strategy(StrategyOptions, ABC):
    """A way to train on many ranks. Every strategy derives from this class; its options are its
    fields.

    Attributes: helpers: it starts processes beside the ranks. slices: it needs `Part.sample`, a
        batch as the model will get it, and applies before all others.
    """

    needs_helper_processes: ClassVar[bool] = False
    needs_example_batch: ClassVar[bool] = False

    @abstractmethod
    def apply_strategies(self, part: LocalModel, mesh: Mesh) -> LocalModel:
        """Return what this rank holds afterwards. Collective: every rank of the mesh calls it."""

    @property
    def deviations(self) -> list[str]:
        """Sentences for the beginning of a run, about numbers that are not those of one device."""
        return []

    def colocations(self, uncut: FullModel) -> Sequence[Colocation]:
        """Return modules that must lie in one stage of a pipeline. Called on one rank.

        Args: uncut: a model that is one stage as yet.
        Raises: StrategyRefused: its options do not fit the model.
        """
        return []


def single_device(module: nn.Module, sample: ExampleBatch | None = None) -> LocalModel:
    """The part of a world of one: all of the model, and nobody to talk to."""

    def forward(batch: LocalBatch) -> ForwardOutput:
        return loss(module(*batch.inputs), batch)

    owned = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    return LocalModel(
        module,
        forward,
        backward,
        owned,
        reduce_gradients=no_op,
        gather_params=no_op,
        example_inputs=sample,
    )


def no_op() -> None:
    """The reduce and the gather of a rank that has nobody to talk to."""


def apply_strategies(part: LocalModel, strategies: Iterable[Strategy], mesh: Mesh) -> LocalModel:
    """Fold the strategies over a part. Collective."""
    strategies = list(strategies)
    part = replace(part, colocations=tuple(strategy.colocations for strategy in strategies))
    for strategy in strategies:
        part = strategy.apply_strategies(part, mesh)
    return part


def backward(forward: Forward, batch: LocalBatch) -> StepResult:
    """Forward and backward of one micro-batch on one rank."""
    outcome = forward(batch)
    if outcome.totals_param is None:
        outcome.loss.backward()
    else:
        torch.autograd.backward((outcome.loss, outcome.totals_param), (None, outcome.step_totals))
    return StepResult(outcome.step_totals, outcome.is_sum_and_count)


def refuse_unless_scalar(loss: Tensor) -> None:
    """Raise UsageError where a loss function gave a tensor of many numbers, such as one for
    each sample.
    """
    if loss.dim() != 0:
        raise UsageError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; it must return the mean over "
            "its batch "
            "(a scalar), or a (sum, count) pair of scalars."
        )


def loss(output: Any, batch: LocalBatch) -> ForwardOutput:
    """The loss of a micro-batch, weighed by its share of the global batch, and its totals.

    The objectives of all shares sum to the global mean: sum_i (rows_i / global_rows) mean_i. A loss
    that counts for itself is divided by `global_rows` for now, which every rank knows, and by the
    true count once that is known (`settle`), so that no rank waits for a count before its backward
    pass."""
    value = batch.loss_fn(output, batch.target)
    weighed = isinstance(value, tuple)
    total, count = value if isinstance(value, tuple) else (value, batch.num_samples)
    refuse_unless_scalar(total)
    rows = (
        min(batch.num_samples, 1) if weighed else batch.num_samples
    )  # by which `total` is to be multiplied; 0 for a stand-in
    share = rows / batch.global_batch_size * batch.grad_weight
    # Few operations: each takes as long as a small layer.
    exact = total.detach() if total.dtype.itemsize >= 4 else total.detach().float()
    weight, known = _known(
        rows, batch.num_samples, batch.stop_requested, batch.grad_weight, exact.dtype, exact.device
    )
    totals = torch.cat((exact * weight, known))
    if weighed and rows:
        totals[COUNT] = count * batch.grad_weight
    if batch.measure is not None and rows:
        measured = batch.measure(output, batch.target).detach()
        if len(measured) > TOTALS_LENGTH - MEASURED:
            raise UsageError(
                f"measure returned {len(measured)} numbers; a step carries "
                f"{TOTALS_LENGTH - MEASURED}."
            )
        totals[MEASURED : MEASURED + len(measured)] = measured * batch.grad_weight
    if batch.previous_totals is not None:
        totals += batch.previous_totals
    return ForwardOutput(total if share == 1.0 else total * share, totals, weighed)


@lru_cache(maxsize=64)
def _known(
    rows: int, count: int, stop: bool, scale: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """By what the loss is multiplied, (1,), and the totals from COUNT on, as far as they are known
    beforehand.

    Both are the same in nearly every step, and a number of Python's would be made a tensor in each.
    """
    known = [rows * scale, count * scale, stop * scale] + [0.0] * (TOTALS_LENGTH - MEASURED)
    made = torch.tensor(known, dtype=dtype, device=device)
    return made[:COUNT], made[COUNT:]


@lru_cache(maxsize=64)
def cached_scalar_tensor(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar tensor, never to be written: torch makes one anew for each operation with a
    number of Python's.
    """
    return torch.tensor(value, dtype=dtype, device=device)


def forward_backward(part: LocalModel, batch: LocalBatch) -> StepResult:
    """Forward and backward of a rank's share, until the owned gradients are global means.
    Collective.
    """
    loss = part.run(part.forward, batch)
    part.reduce_gradients()
    return loss


def rescale_by_count(part: LocalModel, loss: StepResult, global_rows: int) -> None:
    """Divide owned gradients by the global count that a loss counted for itself, now that it is
    known.
    """
    if not loss.is_sum_and_count:
        return
    scale_gradients(part, global_rows / count_or_one(loss.step_totals))


def scale_gradients(part: LocalModel, factor: Tensor) -> None:
    """Multiply the global gradients by a scalar tensor, wherever they lie."""
    gradients = [
        to_local(parameter.grad)
        for parameter in part.trainable_params.values()
        if parameter.grad is not None
    ]
    if gradients:
        foreach_mul_(gradients, factor)
    if part.remote_optimizer is not None:
        part.remote_optimizer.scale(factor)


def gradient_norm(part: LocalModel, gradients: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of gradients by the names of `part.owned`, over all ranks that hold parts of
    the model. Collective.
    """
    if part.pipeline_axis is None:
        return global_norm(gradients.values())
    mine = global_norm(
        gradient for name, gradient in gradients.items() if name not in part.duplicated_params
    )
    # In one type on all ranks: a stage without parameters has none of its own, and all must clip by
    # the same factor.
    return part.pipeline_axis.all_reduce(
        mine.to(part.pipeline_axis.device, torch.float64).square()
    ).sqrt()


def count_or_one(totals: Tensor) -> Tensor:
    """The global count; 1 where nothing counted, so that a batch of ignored tokens gives zeros
    and no NaN.
    """
    count = totals[COUNT]
    return torch.where(count == 0, torch.ones_like(count), count)
