"""The work of a model in one training step, as counted by `shoal.planner.trace_model`.

A *segment* is a stretch of the forward pass during which one module's own code runs:

      GPT   token │ position │ blocks.0 │ blocks.0.attention.qkv │ ... │ head │ (loss)

Each quantity is affine in the number of samples: weights do not depend on it, activations do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Affine(NamedTuple):
    """A quantity of a pass through some samples: constant + slope * samples."""

    constant: float
    slope: float

    def at(self, samples: float) -> float:
        return self.constant + self.slope * samples

    def __add__(self, other: Affine) -> Affine:  # type: ignore[override]
        return Affine(self.constant + other.constant, self.slope + other.slope)

    def scaled(self, factor: float) -> Affine:
        return Affine(self.constant * factor, self.slope * factor)


NOTHING = Affine(0.0, 0.0)


class OpWork(NamedTuple):
    """Equal operations of a segment.

    Attributes:
        kind: matmul (attention too), conv, memory (all others), or view (no data is touched).
        flops: floating-point operations of each.
        moved_bytes: bytes of the tensors that each reads and writes.
        number: how many there are.
        itemsize: bytes of a number of the result.
    """

    kind: str
    flops: Affine
    moved_bytes: Affine
    number: int
    itemsize: int = 4


@dataclass(frozen=True)
class SegmentWork:
    """A stretch of the forward pass, and the part of the backward pass that belongs to it.

    Bytes are those of activations; weights, their gradients and optimizer states are not in them.

    Attributes:
        path: module whose code runs; "" for the model's own code and the loss.
        kept: bytes that are alive after its forward pass and were not before it. Negative where it
            frees what an earlier segment has made.
        forward_extra: the most that its forward pass holds at once beyond what was alive before it.
        backward_extra: the most that its backward pass holds at once beyond all `kept` bytes up to
            and including this segment; new gradients of weights count until they are accumulated.
        gradient_extra: the same, with all gradients of weights that exist at that moment but those
            of the segments behind it.
        output_bytes: of the tensors that its last module call returns.
        parameters: names of the parameters that the module owns.
    """

    path: str
    forward: tuple[OpWork, ...]
    backward: tuple[OpWork, ...]
    kept: Affine
    forward_extra: Affine
    backward_extra: Affine
    gradient_extra: Affine
    output_bytes: Affine
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ParameterWork:
    """A parameter of the model.

    Attributes:
        itemsize: bytes of one number.
        optimizer_bytes: of the optimizer's state for the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    optimizer_bytes: float

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def share(self, parts: int) -> float:
        """Return the share that the fullest of `parts` ranks holds of it.

        Shards are cut along dimension 0 and rounded up. A scalar stays whole.
        """
        if not self.shape or not self.shape[0]:
            return 1.0
        return -(-self.shape[0] // parts) / self.shape[0]


@dataclass(frozen=True)
class ModelWork:
    """A model, its loss and its optimizer.

    Attributes:
        segments: in the order of the forward pass.
        parameters: each once, under its first name.
        buffer_bytes: of the model's buffers.
        input_bytes: of a batch.
        optimizer: operations of one optimizer step over all parameters.
        optimizer_extra: the most bytes that the step holds at once besides the states, as a share
            of the largest parameter.
    """

    name: str
    segments: tuple[SegmentWork, ...]
    parameters: tuple[ParameterWork, ...]
    buffer_bytes: float
    input_bytes: Affine
    optimizer: tuple[OpWork, ...]
    optimizer_extra: float

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def flops(self, samples: float) -> float:
        """Return the floating-point operations of a forward and a backward pass."""
        return sum(
            op.number * op.flops.at(samples)
            for segment in self.segments
            for op in (*segment.forward, *segment.backward)
        )
