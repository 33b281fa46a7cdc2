"""Carry out a tensor plan: parameters become shards, and modules get classes that know it.

A module keeps its identity, its hooks and its place in the model; only its `__class__` is
replaced, say nn.Linear by ColumnParallelLinear. Parameters become DTensors, so that checkpoints,
norms and optimizers know that they are shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shoal.comm.mesh import Mesh
from shoal.platform.torch_private.module_state import own_buffers
from shoal.strategies.tensor.candidates import CONVOLUTIONS, is_gpt2_conv1d
from shoal.strategies.tensor.find_attention import AttentionPlan
from shoal.strategies.tensor.find_pairs import ColumnRowPair
from shoal.strategies.tensor.heads import HeadsRegion
from shoal.strategies.tensor.parallel_layers import (
    BETWEEN_CLASSES,
    CHANNEL_TENSORS,
    COLUMN_CLASSES,
    ROW_CLASSES,
    ColumnParallelGPT2Conv1D,
    RowParallelGPT2Conv1D,
    ShardedMultiheadAttention,
)
from shoal.strategies.tensor.plan import TRANSFORMER_LAYERS, TensorPlan
from shoal.strategies.tensor.region import Region
from shoal.strategies.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead
from shoal.weights.deferred_init import DeferredWeights


def apply(
    plan: TensorPlan,
    model: nn.Module,
    mesh: Mesh,
    sequence: bool = False,
    weights: DeferredWeights | None = None,
) -> None:
    """Divide the modules of `model` in place. Collective, for the device mesh is made here.

    Each rank takes its shards from the full parameters, which must be equal on all ranks of the
    tensor axis. A pipeline stage without a divided module calls it too.

    Args:
        sequence: the outputs of row parallel layers and of the embedding are sequence parallel.
        weights: those that have no memory yet. This rank fills a layer, and keeps its shard.
    """
    parallelizer = _TensorParallelizer(model, mesh, sequence, weights)
    for name in plan.multihead:
        parallelizer.shard_multihead(name)
    for attention in plan.heads:
        parallelizer.shard_attention(attention)
    for name in plan.embeddings:
        embedding = parallelizer.swap_class(name, VocabParallelEmbedding, {"weight": 0})
        embedding.shard_dim = -2 if sequence else None
    for name in plan.vocabulary_heads:
        parallelizer.swap_class(name, VocabParallelHead, {"weight": 0, "bias": 0})
    for pair in plan.pairs:
        parallelizer.shard_pair(pair)
    for module in model.modules():
        if isinstance(module, TRANSFORMER_LAYERS):
            # Switch off torch's fast path in evaluation, which reads the parameters directly.
            module.activation_relu_or_gelu = 0


class _TensorParallelizer:
    """Divides modules of one model.

    Attributes:
        sharded: shards by their full parameter, so that a tied parameter stays tied.
        regions: regions by the name of their module; several pairs may share one.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, sequence: bool, weights: DeferredWeights | None
    ) -> None:
        self.modules = dict(model.named_modules())
        self.mesh = mesh
        self.sequence = sequence
        self.weights = weights
        # Making the device mesh is collective: every rank asks for it, whatever it divides.
        self.device_mesh = mesh.device_mesh
        self.sharded: dict[nn.Parameter, nn.Parameter] = {}
        self.regions: dict[str, Region] = {}

    def swap_class(self, name: str, new_class: type[nn.Module], dims: dict[str, int]) -> Any:
        """Replace a module's class, and its tensors by shards along the given dims.

        Return the module.
        """
        module: Any = self.modules[name]
        assert "full_class" not in vars(module), f"{name} is cut twice"
        module.full_class = type(module)
        module.__class__ = new_class
        for key, dim in dims.items():
            self._shard_tensor(module, key, dim)
        module.axis = self.mesh.tensor
        return module

    def shard_column(self, name: str, fused: int = 1) -> Any:
        """Make a layer column parallel and return it.

        Args: fused: matrices in one; 3 where it holds query, key and value.
        """
        module = self.modules[name]
        if is_gpt2_conv1d(module):
            column = self.swap_class(name, ColumnParallelGPT2Conv1D, {"weight": 1, "bias": 0})
        else:
            column = self.swap_class(name, COLUMN_CLASSES[type(module)], {"weight": 0, "bias": 0})
        column.parts = fused
        return column

    def shard_row(self, name: str) -> Any:
        """Make a layer row parallel and return it. Its bias is replicated."""
        module = self.modules[name]
        if is_gpt2_conv1d(module):
            row = self.swap_class(name, RowParallelGPT2Conv1D, {"weight": 0})
        else:
            row = self.swap_class(name, ROW_CLASSES[type(module)], {"weight": 1})
        owner = self.modules[name.rpartition(".")[0]]
        is_time_first = isinstance(owner, TRANSFORMER_LAYERS) and not owner.self_attn.batch_first
        sequence_dim = 0 if is_time_first else -2
        row.shard_dim = sequence_dim if self.sequence else None
        return row

    def shard_pair(self, pair: ColumnRowPair) -> None:
        """Divide a pair and the modules between its layers."""
        region = self._region(pair.region)
        row = self.modules[pair.row]
        channel_dim = -1 - len(row.kernel_size) if isinstance(row, CONVOLUTIONS) else -1
        for name in pair.columns:
            self.shard_column(name).region = region
        self.shard_row(pair.row).region = region
        columns, called = (
            [self.modules[name] for name in names]
            for names in (pair.columns, {*pair.between, *pair.called})
        )
        region.guard(columns, called, row)
        for name in pair.between:
            module: Any = self.modules[name]
            if type(module) not in BETWEEN_CLASSES:  # pooling: the same on fewer channels
                continue
            dims = {key: 0 for key in CHANNEL_TENSORS if hasattr(module, key)}
            between = self.swap_class(name, BETWEEN_CLASSES[type(module)], dims)
            between.dim = channel_dim
            between.region = region
            for key in vars(module).keys() & {"groups", "num_groups"}:
                setattr(module, key, getattr(module, key) // self.mesh.tensor.size)

    def shard_attention(self, attention: AttentionPlan) -> None:
        """Divide attention that is known by its names, or a pair of the user's plan."""
        columns = [self.shard_column(name, attention.fused) for name in attention.columns]
        layers = [*columns, self.shard_row(attention.row)]
        owner = self.modules[attention.owner]
        module = self.modules[attention.name]
        region = HeadsRegion(module, owner, self.mesh.tensor, layers, attention)
        for layer in layers:
            layer.region = region
        region.guard(columns, {*module.modules()} - {module, owner, *layers}, layers[-1])
        module.forward = region

    def shard_multihead(self, name: str) -> None:
        """Divide nn.MultiheadAttention; its output layer is only a store of parameters."""
        in_projection = {"in_proj_weight": 0, "in_proj_bias": 0}
        module = self.swap_class(name, ShardedMultiheadAttention, in_projection)
        module.region = Region(module, name, self.mesh.tensor)
        module.sequence = self.sequence
        out_name = f"{name}.out_proj" if name else "out_proj"
        self.swap_class(out_name, type(module.out_proj), {"weight": 1})

    def _region(self, name: str) -> Region:
        """Return the region of a module, or of the module around it that is called."""
        module = self.modules[name]
        while name and isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # never called
            name = name.rpartition(".")[0]
            module = self.modules[name]
        if name not in self.regions:
            self.regions[name] = Region(module, name, self.mesh.tensor)
            module.forward = self.regions[name]
        return self.regions[name]

    def _shard_tensor(self, module: nn.Module, key: str, dim: int) -> None:
        """Replace a parameter or buffer by this rank's shard, a DTensor."""
        full = getattr(module, key)
        if full is None:
            return
        if key in own_buffers(module):
            setattr(module, key, self._local_dtensor(full, dim))
            return
        if full not in self.sharded:
            shard = self._local_dtensor(full, dim).detach()
            self.sharded[full] = nn.Parameter(shard, requires_grad=full.requires_grad)
        setattr(module, key, self.sharded[full])

    def _local_dtensor(self, full: Tensor, dim: int) -> DTensor:
        """Return this rank's shard of a tensor that all ranks have. No communication."""
        axis = self.mesh.tensor
        if self.weights is not None:
            full = self.weights.values(full)
        size = full.shape[dim] // axis.size
        # A clone, so that the full tensor can be freed.
        shard = full.narrow(dim, axis.rank * size, size).clone(
            memory_format=torch.contiguous_format
        )
        return DTensor.from_local(
            shard, self.mesh.device_mesh["tensor"], [Shard(dim)], run_check=False
        )
