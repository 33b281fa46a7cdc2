"""A model's parameters laid end to end, so that a part is one run of memory: values come straight into it.

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

from shoal.server.layout import Part, Segment

COUNTERS = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers keep once for a parameter, whatever its shape; a scalar parameter's state looks alike."""


class Flat:
    """Flat CPU memory for the values and for the gradients of some parameters.

    On the CPU, parameters become windows on the values. On a device they stay, and `fetch` copies.

    Attributes:
        values, gradients: of each part, flat tensors of its length.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Sequence[Part]) -> None:
        self.parameters, self.parts = parameters, parts
        self.values, self.gradients = _run(parts), _run(parts)
        self.windows = _windows(parts, self.values, parameters)
        self.gradient_windows = _windows(parts, self.gradients, parameters)
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

    @torch.no_grad()
    def fetch(self, names: Iterable[str]) -> None:
        """Parameters on a device become the values."""
        for name in names if self.on_device else ():
            self.parameters[name].copy_(self.windows[name], non_blocking=True)

    def gather(self, name: str, kept: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """One parameter's optimizer state out of its segments': tensors in its shape, scalars as they are."""
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
            lying[name] = {key: _lying(key, value, parameter) for key, value in states(name).items()}
        return [[_share(lying[segment.name], segment) for segment in part.segments] for part in self.parts]


def _run(parts: Sequence[Part]) -> list[Tensor]:
    """A tensor for each part; those of one kind lie end to end, so a cut parameter is whole all the same."""
    lengths: dict[tuple[int, torch.dtype], int] = {}
    starts = []
    for part in parts:
        kind = (part.group, part.dtype)
        starts.append(lengths.get(kind, 0))
        lengths[kind] = starts[-1] + part.length
    memory = {kind: torch.zeros(length, dtype=kind[1]) for kind, length in lengths.items()}
    return [memory[p.group, p.dtype][start : start + p.length] for p, start in zip(parts, starts, strict=True)]


def _windows(
    parts: Sequence[Part], memory: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    windows = {}
    for part, tensor in zip(parts, memory, strict=True):
        for segment in part.segments:
            if segment.start == 0:
                like = parameters[segment.name]
                first = tensor.storage_offset() + segment.offset
                windows[segment.name] = torch.empty(0, dtype=part.dtype).set_(
                    tensor.untyped_storage(), first, like.shape, _strides(like)
                )
    return windows


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own, where its numbers lie without gaps; else those of a contiguous tensor."""
    dense = torch.empty_like(parameter, device="meta")
    return dense.stride()


def _shaped(value: Any, parameter: Tensor) -> Any:
    """Numbers as they lie, in the parameter's shape."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value.as_strided(parameter.shape, _strides(parameter))


def _lying(key: str, value: Any, parameter: Tensor) -> Any:
    """The inverse: numbers in the order in which the parameter's lie."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (parameter.dim() > 0 or key in COUNTERS)):
        return value
    lying = torch.empty(parameter.numel(), dtype=value.dtype)
    lying.as_strided(parameter.shape, _strides(parameter)).copy_(value)
    return lying


def _share(state: Mapping[str, Any], segment: Segment) -> dict[str, Any]:
    end = segment.start + segment.length
    return {k: v[segment.start : end] if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}


def _segments(
    parts: Sequence[Part], name: str, kept: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterable[tuple[Segment, Mapping[str, Any]]]:
    for part in parts:
        for segment, state in zip(part.segments, kept[part.number], strict=True):
            if segment.name == name:
                yield segment, state
