"""Values that are used beside the samples of a batch: what one rank tells the others of them."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ELEMENTS = 1 << 26
"""Elements of a tensor that is compared; larger ones hold a whole data set."""


class UsedValue(NamedTuple):
    """A value that was given to a function of torch.

    Attributes:
        function: its name.
        line: of the script, such as "train.py:12".
        kind: "" for a number, and a tensor's shape.
        value: six digits of a number, or of the sum of a tensor; "" for one of the batch.
    """

    function: str
    line: str
    kind: str
    value: str

    @classmethod
    def of(cls, function: str, line: str, value: Real | Tensor | None) -> UsedValue:
        """Return what tells a number or a tensor from others; None is for one of the batch."""
        if value is None:
            return cls(function, line, "", "")
        if isinstance(value, Tensor):
            total = value.detach().sum(dtype=torch.float64).item()
            kind = f"a tensor of shape {tuple(value.shape)}" if value.dim() else ""
            return cls(function, line, kind, f"{total:.6g}")
        text = str(value) if isinstance(value, Integral) else f"{float(value):.6g}"
        return cls(function, line, "", text)

    def __str__(self) -> str:
        return f"{self.kind} with the sum {self.value}" if self.kind else self.value

    def differs_from(self, other: UsedValue) -> bool:
        """Return True for another value of the same kind; lengths of samples make shapes."""
        is_known = bool(self.value and other.value)
        return is_known and self.kind == other.kind and self.value != other.value


def differing_uses(passes: list[list[UsedValue]]) -> Iterator[tuple[UsedValue, UsedValue]]:
    """Yield pairs of uses by the same function and line with other values.

    Each pass is compared with the first, up to where it goes another way.
    """
    for uses in passes[1:]:
        for one, other in zip(passes[0], uses, strict=False):
            if (one.function, one.line) != (other.function, other.line):
                break
            if one.differs_from(other):
                yield one, other
