"""Facts about a local model that a later strategy must know, whichever strategy made them so.

Among them are the needs of the models between steps: to be evaluated, tried, and applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.axis import Axis
from shoal.strategies.full_model import FullModel


@dataclass(frozen=True)
class PassTraits:
    """Facts about the passes of a step through the module."""

    complete_after_run: bool = False
    """Gradients and totals are complete only after `run` has returned, because `run` makes many
    passes through parts of `module`, in any order, and records them in a trace. False: `run` makes
    one forward and one backward pass for each micro-batch, totals are complete after the forward
    pass, and each gradient is complete when it arrives.
    """
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
    close: Callable[[], None] = no_op
    """Make the models what they were, before the strategies are applied again. Collective."""


NEEDS_NOTHING = OutsideStep()
"""The needs of models in one piece, on one rank."""
