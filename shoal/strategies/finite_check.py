"""Looks for NaN and infinities in what one rank has computed, in a few microseconds.

A sum is not finite if a term is not. Small tensors are joined first. A sum of finite values may
overflow too: `nonfinite_names` decides then, and as that is rare it may take its time.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.norm import to_local
from shoal.platform.torch_private.kernels import flatten_dense_tensors

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

    def look(self, gradients: Mapping[str, Tensor | None], joined: Tensor | None = None) -> bool:
        """Look at gradients of this rank before they are sent. Return True if one was not finite.

        Args: joined: all of them in one tensor, where there is one.
        """
        if not self.enabled:
            return False
        present = [gradient for gradient in gradients.values() if gradient is not None]
        if not seem_finite(present if joined is None else [joined]):
            names = nonfinite_names(gradients)
            self.found = self.found or bool(names)
            self.names += names
        return self.found


def seem_finite(tensors: Iterable[Tensor]) -> bool:
    """Return False if a value is not finite, or perhaps if only a sum of values is not.

    A DTensor counts with its shard on this rank. With offload some tensors lie on the CPU and some
    on a device. Waits for the device, once.
    """
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sums: list[Tensor] = []
    for tensor in tensors:
        # A plain tensor needs no more calls than these: they are most of the time of a check.
        local = tensor if type(tensor) is Tensor and not tensor.is_sparse else _values(tensor)
        if local.numel() > JOINED_ELEMENTS:
            sums.append(_sum(local))
        else:
            small.setdefault((local.device, local.dtype), []).append(local)
    sums += [_sum(flatten_dense_tensors(joined)) for joined in small.values()]
    if not all(cmath.isfinite(value.item()) for value in sums if value.is_cpu):
        return False
    on_device = [torch.isfinite(value) for value in sums if not value.is_cpu]
    return not on_device or bool(torch.stack(on_device).all())


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
