"""A model's parameters laid end to end, so that a part is one run of memory: values come straight
into it.

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

from shoal.parameter_server.partitioning import ParamSlice, Partition
from shoal.platform.torch_private.tensor_state import is_zerotensor
from shoal.shm_backend.segment import ALIGNMENT_BYTES, SharedSegment

COUNTERS = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers keep once for a parameter, whatever its shape; a scalar parameter's
state looks alike.
"""


class FlatParams:
    """Flat CPU memory for the values and for the gradients of some parameters.

    On the CPU, parameters become windows on the values. On a device they stay, and `fetch` copies.

    Attributes:
        values, gradients: of each part, flat tensors of its length.
        lent, lent_at: the memory of the gradients, and where in it each part lies, in bytes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Sequence[Partition]) -> None:
        self.parameters, self.parts = parameters, parts
        places, size_bytes = _places(parts)
        self.lent, self.lent_at = SharedSegment(size_bytes), places
        own = SharedSegment(size_bytes)
        own.close()  # nobody else reads it
        self.values = [
            own.tensor(at, p.length, p.dtype) for p, at in zip(parts, places, strict=True)
        ]
        self.gradients = [
            self.lent.tensor(at, p.length, p.dtype) for p, at in zip(parts, places, strict=True)
        ]
        self.windows = _views(parts, places, own, parameters)
        self.gradient_windows = _views(parts, places, self.lent, parameters)
        self.on_device = any(parameter.device.type != "cpu" for parameter in parameters.values())
        self.store()
        if not self.on_device:
            for name, parameter in parameters.items():
                parameter.data = self.windows[name]

    @torch.no_grad()
    def store(self) -> None:
        """Values are the parameters'."""
        for name, parameter in self.parameters.items():
            self.windows[name].copy_(parameter)

    def flat_gradient_or_none(self, segment: ParamSlice, gradient: Tensor) -> Tensor | None:
        """A parameter's gradient where autograd has left it, of one segment and flat; None where it
        lies otherwise.

        Args: gradient: the whole parameter's.
        """
        window = self.gradient_windows[segment.name]
        lies_alike = (
            gradient.layout == torch.strided
            and (gradient.dtype, gradient.device) == (window.dtype, window.device)
            and (gradient.shape, gradient.stride()) == (window.shape, window.stride())
        )
        # These say what is to be made of the numbers, or that there are none.
        if not lies_alike or gradient.is_conj() or gradient.is_neg() or is_zerotensor(gradient):
            return None
        begin = gradient.storage_offset() + segment.start
        return gradient.detach().as_strided((segment.length,), (1,), begin)

    @torch.no_grad()
    def copy_to_params(self, names: Iterable[str]) -> None:
        """Parameters on a device become the values."""
        for name in names if self.on_device else ():
            self.parameters[name].copy_(self.windows[name], non_blocking=True)

    def gather(self, name: str, kept: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """One parameter's optimizer state out of its segments': tensors in its shape, scalars
        as they are.
        """
        parameter, found = self.parameters[name], dict[str, Any]()
        for segment, state in _segments(self.parts, name, kept):
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    found[key] = value
                    continue
                whole = found.setdefault(key, torch.empty(parameter.numel(), dtype=value.dtype))
                whole[segment.start : segment.start + segment.length] = value
        return {key: _shaped(value, parameter).contiguous() for key, value in found.items()}

    def scatter(self, states: Callable[[str], Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """The inverse for all parts: each segment's share of its parameter's state."""
        lying: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            lying[name] = {
                key: _to_flat_order(key, value, parameter) for key, value in states(name).items()
            }
        return [
            [_share(lying[segment.name], segment) for segment in part.segments]
            for part in self.parts
        ]


def _places(parts: Sequence[Partition]) -> tuple[list[int], int]:
    """Where each part lies, in bytes; those of one kind lie end to end, so a cut parameter is
    whole all the same.
    """
    kinds: dict[tuple[int, torch.dtype], int] = {}
    for part in parts:
        kinds[part.group, part.dtype] = kinds.get((part.group, part.dtype), 0) + part.size_bytes
    end = 0
    for kind, size_bytes in kinds.items():
        kinds[kind], end = end, end + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    places = []
    for part in parts:
        places.append(kinds[part.group, part.dtype])
        kinds[part.group, part.dtype] += part.size_bytes
    return places, end


def _views(
    parts: Sequence[Partition],
    places: Sequence[int],
    memory: SharedSegment,
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Each parameter's numbers in its own shape and strides."""
    windows = {}
    for part, place in zip(parts, places, strict=True):
        for segment in part.segments:
            if segment.start == 0:
                like = parameters[segment.name]
                lying = memory.tensor(
                    place + segment.offset * part.dtype.itemsize, like.numel(), part.dtype
                )
                windows[segment.name] = lying.as_strided(like.shape, _strides(like))
    return windows


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own, where its numbers lie without gaps; else those of a contiguous
    tensor.
    """
    dense = torch.empty_like(parameter, device="meta")
    return dense.stride()


def _shaped(value: Any, parameter: Tensor) -> Any:
    """Numbers as they lie, in the parameter's shape."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value.as_strided(parameter.shape, _strides(parameter))


def _to_flat_order(key: str, value: Any, parameter: Tensor) -> Any:
    """The inverse: numbers in the order in which the parameter's lie."""
    if not isinstance(value, Tensor) or (
        value.dim() == 0 and (parameter.dim() > 0 or key in COUNTERS)
    ):
        return value
    lying = torch.empty(parameter.numel(), dtype=value.dtype)
    lying.as_strided(parameter.shape, _strides(parameter)).copy_(value)
    return lying


def _share(state: Mapping[str, Any], segment: ParamSlice) -> dict[str, Any]:
    end = segment.start + segment.length
    return {
        k: v[segment.start : end] if isinstance(v, Tensor) and v.dim() else v
        for k, v in state.items()
    }


def _segments(
    parts: Sequence[Partition], name: str, kept: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterable[tuple[ParamSlice, Mapping[str, Any]]]:
    for part in parts:
        for segment, state in zip(part.segments, kept[part.number], strict=True):
            if segment.name == name:
                yield segment, state
