"""Attention that is divided between heads, compared with that of the full model at first.

`find_attention.py` knows the layers of attention by their names only, and `user_plan.py` by the
user's word. The code between these layers is not examined. So the first forward pass in training,
and the first in evaluation, is computed twice on every rank: with the shards, and with the full
parameters. A difference is an error. That costs one forward pass each.

      full      weights of heads 0 1 2 3 ─┐
                                          ├─ compared: equal, or this rank's shard along one dim
      rank 0    weights of heads 0 1 ─────┘

An output that is a shard, such as the attention weights of this rank's heads, becomes a tensor
that is gathered where somebody uses it (`lazy_gather.py`).
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mappings import all_gather_dim
from shoal.comm.norm import full_tensor
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import own_parameters
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.strategies.tensor.dropout_rng import GlobalDropout
from shoal.strategies.tensor.lazy_gather import LazyGatherTensor
from shoal.strategies.tensor.region import Region

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative difference; 0.1 for shorter dtypes. A wrong plan differs in the first digit."""


class HeadShardedTensor(LazyGatherTensor):
    """An output of which each rank has a shard for its heads, such as attention weights."""


class HeadsRegion(Region):
    """A region whose first forward passes are compared with those of the full model.

    Args:
        layers: the column and row parallel layers.
        counts: (module, attribute) of each number that is 1/T on a rank, such as `num_heads`.

    Attributes:
        output_dims: for training and for evaluation, after the first pass: for each tensor of
            the output the dim along which it is a shard, None if it is replicated.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        axis: Axis,
        layers: list[Any],
        counts: list[tuple[nn.Module, str]],
    ) -> None:
        super().__init__(module, name, axis)
        self.layers = layers
        self.counts = counts
        self.output_dims: dict[bool, list[int | None]] = {}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.depth:  # its forward pass calls itself
            return self._forward_sharded(*inputs, **options)
        if self.module.training in self.output_dims:
            return self._wrap_outputs(self._forward_sharded(*inputs, **options))

        # The first pass in this mode. A forward pass may write into its inputs, into a cache say,
        # so the second one gets copies.
        copied_inputs, copied_options = copy_without_tensors((inputs, options))
        expected = self._forward_full(*copied_inputs, **copied_options)
        try:
            output = self._forward_sharded(*inputs, **options)
        except RuntimeError as error:
            raise StrategyRefused(
                f"{self._error_head()}its forward pass fails: {error}. {self._suggestion()}"
            ) from error
        self.output_dims[self.module.training] = self._compare(output, expected)
        return self._wrap_outputs(output)

    def scale_counts(self, numerator: int, denominator: int) -> None:
        """Multiply each count by numerator / denominator."""
        for module, key in self.counts:
            setattr(module, key, getattr(module, key) * numerator // denominator)

    def _forward_sharded(self, *inputs: Any, **options: Any) -> Any:
        # An output that was wrapped may come back as an input: a cache of keys and values, say.
        # The heads of this rank need their shard of it only.
        inputs, options = tree_map_only(
            HeadShardedTensor, lambda x: x if x.written else x.local, (inputs, options)
        )
        with GlobalDropout(self.axis) if self.module.training else nullcontext():
            return super().__call__(*inputs, **options)

    def _forward_full(self, *inputs: Any, **options: Any) -> Any:
        """Compute with the full parameters, and put the shards back. Collective."""
        sharded_classes = [type(layer) for layer in self.layers]
        sharded_parameters = [dict(own_parameters(layer)) for layer in self.layers]
        device = self.axis.device
        # The random state is restored: the sharded pass draws the same numbers afterwards.
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for layer in self.layers:
                layer.__class__ = layer.full_class
                _gather_parameters(layer)
            self.scale_counts(self.axis.size, 1)
            self.depth += 1
            try:
                return type(self.module).forward(self.module, *inputs, **options)
            finally:
                self.depth -= 1
                self.scale_counts(1, self.axis.size)
                for layer, sharded_class, parameters in zip(
                    self.layers, sharded_classes, sharded_parameters, strict=True
                ):
                    layer.__class__ = sharded_class
                    own_parameters(layer).update(parameters)

    def _compare(self, output: Any, expected: Any) -> list[int | None]:
        """Return for each tensor of the output the dim along which this rank has a shard.

        Raises:
            StrategyRefused: the output is neither that of the full model nor a shard of it.
        """
        leaf_pairs = zip(tree_leaves(output), tree_leaves(expected), strict=False)
        tensor_pairs = [
            (actual, full)
            for actual, full in leaf_pairs
            if isinstance(actual, Tensor) and isinstance(full, Tensor)
        ]
        if _tensor_mask(output) != _tensor_mask(expected) or not tensor_pairs:
            raise StrategyRefused(
                f"{self._error_head()}its output has other parts than that of the whole. "
                f"{self._suggestion()}"
            )
        return [self._compare_tensor(actual.detach(), full) for actual, full in tensor_pairs]

    def _compare_tensor(self, actual: Tensor, expected: Tensor) -> int | None:
        """Return the dim along which `actual` is a shard of `expected`; None for equal tensors."""
        shard_dim = self._find_shard_dim(actual, expected)
        if shard_dim is not None:
            actual = all_gather_dim(actual, self.axis, shard_dim, expected.shape[shard_dim])
        is_same_shape = actual.shape == expected.shape
        error = _relative_error(actual, expected) if is_same_shape else torch.inf
        if not error <= TOLERANCES.get(actual.dtype, 0.1):
            raise StrategyRefused(
                f"{self._error_head()}its output is not that of the whole (relative difference "
                f"{error:.1e}). {self._suggestion()}"
            )
        return shard_dim

    def _find_shard_dim(self, actual: Tensor, expected: Tensor) -> int | None:
        """Return the one dim in which `actual` is 1/T of `expected`, if there is exactly one."""
        if actual.dim() != expected.dim():
            return None
        differing = [dim for dim in range(actual.dim()) if actual.shape[dim] != expected.shape[dim]]
        if len(differing) != 1:
            return None
        (dim,) = differing
        return dim if actual.shape[dim] * self.axis.size == expected.shape[dim] else None

    def _wrap_outputs(self, output: Any) -> Any:
        """Return the output, with each shard in it wrapped as a HeadShardedTensor."""
        dims = self.output_dims[self.module.training]
        if sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output)) != len(dims):
            raise StrategyRefused(
                f"{self._error_head()}its output has other parts than in its first forward pass, "
                f"which were not compared with those of the whole. {self._suggestion()}"
            )
        if all(dim is None for dim in dims):
            return output
        remaining_dims = iter(dims)

        def wrap(tensor: Tensor) -> Tensor:
            dim = next(remaining_dims)
            if dim is None:
                return tensor
            return HeadShardedTensor.from_local(tensor, self.axis, dim)

        return tree_map_only(Tensor, wrap, output)

    def _error_head(self) -> str:
        return f"{self.name or 'the model'}: with its layers in slices "

    def _suggestion(self) -> str:
        return (
            "It does more with them than their names, or the plan, tell. Keep it whole: "
            f"tensor={self.axis.size},whole={self.name or '...'}."
        )


def _gather_parameters(layer: nn.Module) -> None:
    """Replace the layer's shards by full parameters. Collective."""
    parameters = own_parameters(layer)
    for key, parameter in parameters.items():
        # Collectives must not receive into inference tensors.
        with torch.inference_mode(False):
            if parameter is not None:
                parameters[key] = nn.Parameter(full_tensor(parameter), False)


def _tensor_mask(output: Any) -> list[bool]:
    """Return for each leaf of the output whether it is a tensor."""
    return [isinstance(leaf, Tensor) for leaf in tree_leaves(output)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    size = expected.abs().max().double()
    error = (actual.double() - expected.double()).abs().max()
    return float(error / size if size else error)


def copy_without_tensors(nest: Any) -> Any:
    """Copy all objects of a nest, but share their tensors.

    Return the nest itself if one of its objects cannot be copied.
    """
    try:
        with _ShareTensorsOnDeepcopy():
            return deepcopy(nest)
    except Exception:  # noqa: BLE001 - a __deepcopy__ of the user's may raise anything
        return nest


class _ShareTensorsOnDeepcopy(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
