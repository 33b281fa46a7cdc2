"""Looks into a run without a change of it: full parameters, this rank's buffers, its models."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.run import train_state
from shoal.run.run import Run


def models_of(run: Run) -> nn.Module | None:
    """Return the model, or the group of all models; None before one is prepared."""
    try:
        return run._prepared.root
    except UsageError:
        return None


def draws_of_loop(run: Run) -> str:
    """Return what the loop was seen to draw random numbers by for its samples; "" if by nothing."""
    return run._prepared.watch.drawn


def optimizers_of(run: Run) -> list[Optimizer]:
    """Return the optimizers that step parameters now."""
    return run._prepared.optimizers


def full_parameters(run: Run, names: Collection[str]) -> dict[str, Tensor]:
    """Return the full model's parameters of these names. Collective.

    Unlike `Run.weights` it leaves buffers as they are, and synchronises no ranks.
    """
    local_model = run._prepared.local_model()
    local_model.strategy_state.wait()
    full = train_state.full_state_dict(local_model)
    return {name: value for name, value in full.items() if name in names}


def local_buffers(run: Run) -> dict[str, Tensor]:
    """Return this rank's buffers."""
    return dict(run._prepared.local_model().module.named_buffers())
