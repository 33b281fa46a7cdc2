"""GPT-2's `Conv1D`: a linear layer whose weight lies the other way round, (in, out). Known by its name and its shape.

column   weight (in, out/T), bias (out/T)        row   weight (in/T, out), bias whole
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.strategies.sliced.fused import regrouped
from shoal.strategies.sliced.linear import added, summed
from shoal.strategies.sliced.region import Region, here
from shoal.torch_private.module_state import own_parameters


def is_transposed(module: Any) -> bool:
    """Whether it computes x @ weight + bias, as the class of that name in Hugging Face's library does."""
    if type(module).__name__ != "Conv1D" or set(own_parameters(module)) != {"weight", "bias"}:
        return False
    weight, bias = own_parameters(module)["weight"], own_parameters(module)["bias"]
    if not (isinstance(weight, Tensor) and isinstance(bias, Tensor) and weight.dim() == 2):
        return False
    return bool(weight.shape[1] == len(bias) == getattr(module, "nf", None))


class ColumnTransposed(nn.Module):
    """Gives this rank's slice of the outputs."""

    region: Region
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.region.entered(x).linear(here(self.weight).t(), here(self.bias))


class FusedColumnTransposed(nn.Module):
    """A column layer of several matrices, side by side."""

    region: Region
    parts: int
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        axis = self.region.axis
        weight = regrouped(here(self.weight).t(), axis, self.parts)
        return self.region.entered(x).linear(weight, regrouped(here(self.bias), axis, self.parts))


class RowTransposed(nn.Module):
    """Takes this rank's slice of the inputs; the outputs are whole."""

    region: Region
    along: int | None
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return added(summed(x, here(self.weight).t(), self.region.axis, self.along), self.bias)
