"""A plan put into effect: parameters become slices, and modules become those that know it."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.strategies.tensor import conv as c
from shoal.strategies.tensor.conv1d_gpt2 import (
    ColumnParallelConv1D,
    FusedColumnTransposed,
    RowTransposed,
    is_gpt2_conv1d,
)
from shoal.strategies.tensor.fused_qkv import FusedColumnLinear
from shoal.strategies.tensor.heads import AttentionPlan, HeadsRegion
from shoal.strategies.tensor.linear import ColumnParallelLinear, RowParallelLinear, SlicedDropout
from shoal.strategies.tensor.multihead import SlicedMultiheadAttention
from shoal.strategies.tensor.pairs import CONVOLUTIONS, ColumnRowPair
from shoal.strategies.tensor.plan import TRANSFORMER_LAYERS, TensorPlan, region_of
from shoal.strategies.tensor.region import Region, shard_parameter
from shoal.strategies.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead

COLUMN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ColumnParallelLinear,
    nn.Conv1d: c.ColumnConv1d,
    nn.Conv2d: c.ColumnConv2d,
    nn.Conv3d: c.ColumnConv3d,
}
ROW: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowParallelLinear,
    nn.Conv1d: c.RowConv1d,
    nn.Conv2d: c.RowConv2d,
    nn.Conv3d: c.RowConv3d,
}
BETWEEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: SlicedDropout,
    nn.BatchNorm1d: c.SlicedBatchNorm1d,
    nn.BatchNorm2d: c.SlicedBatchNorm2d,
    nn.BatchNorm3d: c.SlicedBatchNorm3d,
    nn.GroupNorm: c.SlicedGroupNorm,
    nn.Conv1d: c.GroupedConv1d,
    nn.Conv2d: c.GroupedConv2d,
    nn.Conv3d: c.GroupedConv3d,
}
CHANNELWISE = ("weight", "bias", "running_mean", "running_var")


def apply(plan: TensorPlan, model: nn.Module, mesh: Mesh, sequence: bool = False) -> None:
    """Cut `model` in place. Every rank of the tensor axis holds the same values. Collective on the
    first use of the
    device mesh only, of which a stage without a cut is part: each rank takes its slices of what it
    has.

    Args: sequence: what row layers and the embedding give lies in slices of the sequence.
    """
    cutting = _TensorParallelizer(model, mesh, sequence)
    for name in plan.multihead:
        cutting.multihead(name)
    for heads in plan.heads:
        cutting.heads(heads)
    for name in plan.embeddings:
        cutting.swap_class(name, VocabParallelEmbedding, {"weight": 0}).shard_dim = (
            -2 if sequence else None
        )
    for name in plan.vocabulary_heads:
        cutting.swap_class(name, VocabParallelHead, {"weight": 0, "bias": 0})
    for pair in plan.pairs:
        cutting.pair(pair)
    for module in model.modules():
        if isinstance(module, TRANSFORMER_LAYERS):
            module.activation_relu_or_gelu = (
                0  # its fast path in evaluation would read parameters by itself
            )


class _TensorParallelizer:
    def __init__(self, model: nn.Module, mesh: Mesh, sequence: bool) -> None:
        self.modules, self.mesh, self.sequence = dict(model.named_modules()), mesh, sequence
        self.device_mesh = (
            mesh.device_mesh
        )  # asked for by all ranks together, whether or not they cut anything
        self.made: dict[int, nn.Parameter] = {}
        self.originals: list[nn.Parameter] = []  # alive, or another could get the id of one
        self.regions: dict[str, Region] = {}

    def swap_class(self, name: str, kind: type[nn.Module], dims: dict[str, int]) -> Any:
        """Swap the class, and keep slices along the given dimensions."""
        module: Any = self.modules[name]
        assert "sliced_from" not in vars(module), f"{name} is cut twice"
        module.sliced_from, module.__class__ = type(module), kind
        for key, dim in dims.items():
            if isinstance(getattr(module, key), nn.Parameter):
                self.originals.append(getattr(module, key))
            shard_parameter(module, key, dim, self.mesh, self.made)
        module.axis = self.mesh.tensor
        return module

    def column(self, name: str, fused: int = 1) -> Any:
        module = self.modules[name]
        if is_gpt2_conv1d(module):
            return self.swap_class(
                name,
                FusedColumnTransposed if fused > 1 else ColumnParallelConv1D,
                {"weight": 1, "bias": 0},
            )
        kinds = {**COLUMN, nn.Linear: FusedColumnLinear} if fused > 1 else COLUMN
        return self.swap_class(name, kinds[type(module)], {"weight": 0, "bias": 0})

    def row(self, name: str) -> Any:
        module, owner = self.modules[name], self.modules[name.rpartition(".")[0]]
        turned = is_gpt2_conv1d(module)
        made = self.swap_class(
            name, RowTransposed if turned else ROW[type(module)], {"weight": 0 if turned else 1}
        )
        time_first = isinstance(owner, TRANSFORMER_LAYERS) and not owner.self_attn.batch_first
        made.shard_dim = (0 if time_first else -2) if self.sequence else None
        return made

    def pair(self, pair: ColumnRowPair) -> None:
        region = self.region(region_of(pair))
        row = self.modules[pair.row]
        dim = -1 - len(row.kernel_size) if isinstance(row, CONVOLUTIONS) else -1
        for name in pair.columns:
            self.column(name).region = region
        self.row(pair.row).region = region
        for name in pair.between:
            module: Any = self.modules[name]
            if type(module) in BETWEEN:
                dims = {key: 0 for key in CHANNELWISE if hasattr(module, key)}
                self.swap_class(name, BETWEEN[type(module)], dims).dim = dim
                if isinstance(module, CONVOLUTIONS):
                    module.groups = module.groups // self.mesh.tensor.size

    def heads(self, heads: AttentionPlan) -> None:
        layers = [*(self.column(name, heads.fused) for name in heads.columns), self.row(heads.row)]
        counted = [(self.modules[heads.owner], key) for key in heads.counts]
        module = self.modules[heads.name]
        region = HeadsRegion(module, heads.name, self.mesh.tensor, layers, counted)
        region._count(1, self.mesh.tensor.size)
        for layer in layers:
            layer.region, layer.parts = region, heads.fused
        module.forward = region

    def multihead(self, name: str) -> None:
        module = self.swap_class(
            name, SlicedMultiheadAttention, {"in_proj_weight": 0, "in_proj_bias": 0}
        )
        module.region, module.sequence = Region(module, name, self.mesh.tensor), self.sequence
        self.swap_class(
            f"{name}.out_proj" if name else "out_proj", type(module.out_proj), {"weight": 1}
        )

    def region(self, name: str) -> Region:
        module = self.modules[name]
        while name and isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # nobody calls it
            name = name.rpartition(".")[0]
            module = self.modules[name]
        if name not in self.regions:
            self.regions[name] = Region(module, name, self.mesh.tensor)
            module.forward = self.regions[name]
        return self.regions[name]
