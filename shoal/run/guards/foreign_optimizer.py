"""Steps of optimizers that were not prepared, and hold prepared parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import UsageError
from shoal.run.guards.call_site import call_site
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.state_access import is_access_by_shoal


class ParameterNames:
    """Names of parameters, which are kept alive by nothing here.

    Strategies replace parameters. An optimizer may hold the old ones, which train nothing.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def add(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Add (name, parameter) pairs."""
        for name, parameter in parameters:
            self._names[id(parameter)] = weakref.ref(parameter), name

    def find(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter; None if it is not here."""
        # The id of a freed tensor may have become another one's.
        reference, name = self._names.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None


def guard_foreign_optimizers(guarded: GuardedModels, names: ParameterNames) -> Iterator[Removable]:
    """Check every optimizer that steps in this process; yield the handle of the hook."""
    prepared = {id(optimizer) for optimizer in guarded.optimizers}

    def check(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in prepared or guarded.phase.in_passes or is_access_by_shoal():
            return
        held = [
            name
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (name := names.find(parameter)) is not None
        ]
        if held:
            raise UsageError(
                f"{type(optimizer).__name__}.step(){call_site()}: this optimizer holds {held[0]} "
                f"and was not prepared{guarded.under}. Give it to run.prepare, and step the one "
                "that comes back."
            )

    yield register_optimizer_step_pre_hook(check)


def named_parameters(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) of several models, by their prefixes."""
    for prefix, model in models:
        for name, parameter in model.named_parameters():
            yield f"{prefix}{name}", parameter
