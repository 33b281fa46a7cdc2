"""Checks of gradients before they are sent: accumulated only once, real numbers, and finite.

      h = layer(x)      backward   one accumulation, of both calls' sum ── sent
      y = layer(h)

      h = checkpoint(layer, x, use_reentrant=True)
      y = checkpoint(layer, h, use_reentrant=True)

                        backward   second call accumulates ── sent │ first call accumulates:
                                                                     not sent

Each reentrant checkpoint runs a backward pass of its own. DistributedDataParallel sends a gradient
after its first accumulation. The rest would stay on this rank, and weights would differ between
ranks without an error.

NaN and infinities are looked for in what one rank has computed, in a few microseconds. A sum is not
finite if a term is not. Small tensors are joined first. A sum of finite values may overflow too:
`nonfinite_names` decides then, and as that is rare it may take its time.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from shoal.comm.norm import to_local
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.torch_private.kernels import flatten_dense_tensors


def is_of_script(hook: Any) -> bool:
    """Return True for a hook on gradients or a module that is neither torch's nor Shoal's."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    # Hooks of a strategy may be partial functions, wrapped for torch.compile.
    return str(module).partition(".")[0] not in ("torch", "shoal", "functools")


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


JOINED_ELEMENTS = 1 << 15
"""Largest tensor that is joined with others. To copy a larger one takes longer than a call."""
HALVES = (torch.float16, torch.bfloat16)
"""Dtypes whose sums are taken in float32: 65504 is the largest float16."""


@dataclass
class FiniteCheck:
    """Finds values that are not finite on this rank, before gradients are sent.

    Attributes:
        enabled: False: nobody asks, and nobody is to look.
        has_looked: a strategy has looked at all gradients of this step before it sent them, and has
            sent what it found in the totals.
        found: a gradient of this rank was not finite before it was sent.
        names: parameters whose gradients were not, as far as they are known before the reduction.
        losses: the losses of this rank's micro-batches in this step, detached.
    """

    enabled: bool = False
    has_looked: bool = False
    found: bool = False
    names: list[str] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the step before."""
        self.has_looked = False
        self.found = False
        self.names.clear()
        self.losses.clear()

    def look(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Look at gradients of this rank before they are sent."""
        if not self.enabled:
            return
        if not seem_finite(gradient for gradient in gradients.values() if gradient is not None):
            names = nonfinite_names(gradients)
            self.found = self.found or bool(names)
            self.names += names


def seem_finite(tensors: Iterable[Tensor]) -> bool:
    """Return False if a value is not finite, or perhaps if only a sum of values is not.

    Waits for the device, once.
    """
    return are_finite(read(sums_of(tensors)))


def has_finite_sum(values: Tensor) -> bool:
    """Return `seem_finite` of one plain tensor."""
    return cmath.isfinite(_sum(values).item())


def sums_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return scalars of which one is not finite if a value is not. Waits for no device.

    A DTensor counts with its shard on this rank. Tensors on a device are summed by their squares:
    torch has kernels of many tensors for it, where calls take longer than sums.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    sums: list[Tensor] = []
    on_device: list[Tensor] = []
    for tensor in tensors:
        # A plain tensor needs no more calls than these: they are most of the time of a check.
        local = tensor if type(tensor) is Tensor and not tensor.is_sparse else _values(tensor)
        if not local.is_cpu:
            on_device.append(local)
        elif local.numel() > JOINED_ELEMENTS:
            sums.append(_sum(local))
        else:
            small.setdefault(local.dtype, []).append(local)
    sums += [_sum(flatten_dense_tensors(joined)) for joined in small.values()]
    return [*sums, get_total_norm(on_device)] if on_device else sums


def read(scalars: Sequence[Tensor]) -> list[complex]:
    """Return scalars as Python's numbers. Those on a device are read together: it waits once.

    With offload some lie on the CPU and some on a device.
    """
    on_device = [scalar for scalar in scalars if not scalar.is_cpu]
    numbers = iter(torch.stack(on_device).tolist() if on_device else ())
    return [scalar.item() if scalar.is_cpu else next(numbers) for scalar in scalars]


def are_finite(numbers: Iterable[complex]) -> bool:
    """Return True if all numbers are finite."""
    return all(map(cmath.isfinite, numbers))


def nonfinite_names(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of tensors with a value that is not finite. Looks at each value."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor is not None and not bool(torch.isfinite(_values(tensor)).all())
    ]


def _values(tensor: Tensor) -> Tensor:
    local = to_local(tensor)
    return local.coalesce().values() if local.is_sparse else local.detach()


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32) if values.dtype in HALVES else values.sum()
