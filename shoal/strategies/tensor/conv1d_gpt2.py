"""GPT-2's `Conv1D`: a linear layer whose weight lies the other way round, (in, out). Known by its
name and its shape.

column   weight (in, out/T), bias (out/T)        row   weight (in/T, out), bias whole
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.platform.torch_private.module_state import own_parameters
from shoal.strategies.tensor.fused_qkv import regroup_qkv
from shoal.strategies.tensor.linear import add_bias, row_parallel_matmul
from shoal.strategies.tensor.region import Region, local_shard


def is_gpt2_conv1d(module: Any) -> bool:
    """Whether it computes x @ weight + bias, as the class of that name in Hugging Face's
    library does.
    """
    if type(module).__name__ != "Conv1D" or set(own_parameters(module)) != {"weight", "bias"}:
        return False
    weight, bias = own_parameters(module)["weight"], own_parameters(module)["bias"]
    if not (isinstance(weight, Tensor) and isinstance(bias, Tensor) and weight.dim() == 2):
        return False
    return bool(weight.shape[1] == len(bias) == getattr(module, "nf", None))


class ColumnParallelConv1D(nn.Module):
    """Gives this rank's slice of the outputs."""

    region: Region
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.region.entered(x).linear(local_shard(self.weight).t(), local_shard(self.bias))


class FusedColumnTransposed(nn.Module):
    """A column layer of several matrices, side by side."""

    region: Region
    parts: int
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        axis = self.region.axis
        weight = regroup_qkv(local_shard(self.weight).t(), axis, self.parts)
        return self.region.entered(x).linear(
            weight, regroup_qkv(local_shard(self.bias), axis, self.parts)
        )


class RowTransposed(nn.Module):
    """Takes this rank's slice of the inputs; the outputs are whole."""

    region: Region
    shard_dim: int | None
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return add_bias(
            row_parallel_matmul(x, local_shard(self.weight).t(), self.region.axis, self.shard_dim),
            self.bias,
        )
