"""A model's parameters end to end in flat memory. Each partition is contiguous there, so values are
received straight into it.

parameters   embed.weight   w1     b1         each keeps its name, shape and strides,
            ┌──────────────┬──────┬────┐      and becomes a window on the flat memory
flat        │              │      │    │
            └──────┬───────┴──────┴────┘
parts           0       1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parameter_server.partitioning import ParamSlice, Partition, offsets
from shoal.platform.torch_private.tensor_state import is_zerotensor
from shoal.shm_backend.segment import SharedSegment

COUNTERS = ("step", "mu_product", "eta", "mu")
"""Entries of torch's optimizers that have one value for a parameter of any shape. The state of a
scalar parameter has the same shape, so the name must tell them apart.
"""

_DATA: Any = Tensor.data


class FlatParams:
    """Flat CPU memory for the values and for the gradients of some parameters.

    On the CPU, parameters become windows on the values. On a device they stay there, and
    `copy_to_params` copies.

    Attributes:
        values, gradients: of each partition, flat tensors of its length.
        lent, lent_at: shared memory of the gradients, and each partition's offset in bytes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Sequence[Partition]) -> None:
        self.parameters, self.parts = parameters, parts
        starts, size_bytes = offsets(parts)
        at_bytes = [starts[part.number] for part in parts]
        self.lent = SharedSegment(size_bytes)
        self.lent_at = at_bytes
        own = SharedSegment(size_bytes)
        own.close()  # no other process reads it
        self.values = [
            own.tensor(at, p.length, p.dtype) for p, at in zip(parts, at_bytes, strict=True)
        ]
        self.gradients = [
            self.lent.tensor(at, p.length, p.dtype) for p, at in zip(parts, at_bytes, strict=True)
        ]
        self.windows = _windows(parts, at_bytes, own, parameters)
        self.gradient_windows = _windows(parts, at_bytes, self.lent, parameters)
        self.on_device = any(parameter.device.type != "cpu" for parameter in parameters.values())
        self.store()

    @torch.no_grad()
    def store(self) -> None:
        """Copy the parameters to the values, on which they become windows, though a script has
        given them other memory (`p.data = t`).
        """
        for name, parameter in self.parameters.items():
            self.windows[name].copy_(parameter)
            if not self.on_device:
                parameter.data = self.windows[name]

    def flat_gradient_or_none(self, segment: ParamSlice, gradient: Tensor) -> Tensor | None:
        """Return one segment of a gradient as a flat view of autograd's memory, without a copy.

        None where the gradient has other strides, dtype or device than the flat memory.

        Args: gradient: of the full parameter.
        """
        window = self.gradient_windows[segment.name]
        same_layout = (
            gradient.layout == torch.strided
            and (gradient.dtype, gradient.device) == (window.dtype, window.device)
            and (gradient.shape, gradient.stride()) == (window.shape, window.stride())
        )
        # Lazy conjugates, negatives and zeros have other values than their memory.
        if not same_layout or gradient.is_conj() or gradient.is_neg() or is_zerotensor(gradient):
            return None
        begin = gradient.storage_offset() + segment.start
        return gradient.detach().as_strided((segment.length,), (1,), begin)

    @torch.no_grad()
    def copy_to_params(self, names: Iterable[str]) -> None:
        """Copy the values to the parameters on a device."""
        for name in names if self.on_device else ():
            # The windows are not pinned, and are overwritten by the next pull: wait for the copy.
            # By `.data`, whose version is its own: a script that writes to weights is found by it.
            _DATA.__get__(self.parameters[name]).copy_(self.windows[name])

    def gather(self, name: str, kept: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Join the optimizer state of one parameter from its segments: tensors in its shape,
        scalars unchanged.
        """
        parameter = self.parameters[name]
        joined = dict[str, Any]()
        for part in self.parts:
            for segment, state in zip(part.segments, kept[part.number], strict=True):
                for key, value in state.items() if segment.name == name else ():
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        joined[key] = value
                        continue
                    flat = joined.setdefault(key, torch.empty(parameter.numel(), dtype=value.dtype))
                    flat[segment.start : segment.start + segment.length] = value
        shape, strides = parameter.shape, _strides(parameter)
        return {
            key: value.as_strided(shape, strides).contiguous()
            if isinstance(value, Tensor) and value.dim()
            else value
            for key, value in joined.items()
        }

    def scatter(self, states: Callable[[str], Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Divide states among all partitions: each segment gets its slice of its parameter's
        state.
        """
        flat_states: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            flat_states[name] = {
                key: _to_flat_order(key, value, parameter) for key, value in states(name).items()
            }
        return [
            [_slice(flat_states[segment.name], segment) for segment in part.segments]
            for part in self.parts
        ]


def _windows(
    parts: Sequence[Partition],
    at_bytes: Sequence[int],
    memory: SharedSegment,
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Return each parameter's values in its own shape and strides."""
    windows = {}
    for part, start_byte in zip(parts, at_bytes, strict=True):
        for segment in part.segments:
            if segment.start == 0:
                like = parameters[segment.name]
                flat = memory.tensor(
                    start_byte + segment.offset * part.dtype.itemsize, like.numel(), part.dtype
                )
                windows[segment.name] = flat.as_strided(like.shape, _strides(like))
    return windows


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides, where its values have no gaps in memory; else those of a
    contiguous tensor.
    """
    dense = torch.empty_like(parameter, device="meta")
    return dense.stride()


def _to_flat_order(key: str, value: Any, parameter: Tensor) -> Any:
    """Return values in the parameter's memory order, flat: the inverse of `gather`."""
    if not isinstance(value, Tensor) or (
        value.dim() == 0 and (parameter.dim() > 0 or key in COUNTERS)
    ):
        return value
    flat = torch.empty(parameter.numel(), dtype=value.dtype)
    flat.as_strided(parameter.shape, _strides(parameter)).copy_(value)
    return flat


def _slice(state: Mapping[str, Any], segment: ParamSlice) -> dict[str, Any]:
    end = segment.start + segment.length
    return {
        k: v[segment.start : end] if isinstance(v, Tensor) and v.dim() else v
        for k, v in state.items()
    }
