"""Checks of gradients before they are sent: accumulated only once, and real numbers.

      h = layer(x)      backward   one accumulation, of both calls' sum ── sent
      y = layer(h)

      h = checkpoint(layer, x, use_reentrant=True)
      y = checkpoint(layer, h, use_reentrant=True)

                        backward   second call accumulates ── sent │ first call accumulates:
                                                                     not sent

Each reentrant checkpoint runs a backward pass of its own. DistributedDataParallel sends a gradient
after its first accumulation. The rest would stay on this rank, and weights would differ between
ranks without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shoal.errors import StrategyRefused, UsageError


class AccumulatedOnceCheck:
    """Raises UsageError if a gradient is accumulated a second time in one backward pass.

    Args: parameters: by the names for error messages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._accumulated: set[str] | None = None  # None outside of a checked backward pass
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_accumulate, name))
            for name, parameter in parameters.items()
        ]

    def close(self) -> None:
        """Leave the parameters without hooks, for strategies that are applied to them next."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Check the backward pass inside this context."""
        self._accumulated = set()
        try:
            yield
        finally:
            self._accumulated = None

    def _on_accumulate(self, name: str, _: Tensor) -> None:
        if self._accumulated is None:
            return
        if name in self._accumulated:
            raise accumulated_twice_error(name)
        self._accumulated.add(name)


def accumulated_twice_error(name: str) -> UsageError:
    """Return the error for a gradient that was accumulated twice in one backward pass."""
    return UsageError(
        f"{name}: its gradient came in two pieces in one backward pass, as it does where a "
        "module that is called more than once is recomputed with use_reentrant=True. Use "
        "use_reentrant=False."
    )


def check_real_parameters(parameters: Mapping[str, Tensor], compress: str) -> None:
    """Raise StrategyRefused if a parameter is complex.

    Compression orders, rounds or factors real numbers only.
    """
    names = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if names:
        raise StrategyRefused(
            f"compress={compress} sends real numbers, and {', '.join(names)} is complex. Use "
            "compress=none, or keep torch.view_as_real(parameter) as the parameter."
        )
