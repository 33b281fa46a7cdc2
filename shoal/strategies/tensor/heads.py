"""Attention that is divided between heads, compared with that of the full model at first.

`find_attention.py` knows the layers of attention by their names only. The code between these
layers is not examined. So the first forward pass in training,
and the first in evaluation, is also computed on every rank with the full parameters. A fused
layer may hold query, key and value one after the other, or those of each head together: the first
of both that gives the same output is used. Where none does, as where a script takes the width of a
head from its input (`C // self.n_head`), every rank gathers the layers in each forward pass and
computes all heads.

      full      weights of heads 0 1 2 3 ─┐
                                          ├─ compared: equal, or gathered from now on
      rank 0    weights of heads 0 1 ─────┘

So is attention that returns something of its heads, such as their weights.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import own_parameters
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.strategies.module_snapshot import restored_modules
from shoal.strategies.tensor.dropout_rng import GlobalDropout
from shoal.strategies.tensor.find_attention import AttentionPlan
from shoal.strategies.tensor.region import Region
from shoal.strategies.tensor.sequence import gather_all
from shoal.strategies.tensor.sliced_parameters import gathered_parameter

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative difference; 0.1 for shorter dtypes. A wrong plan differs in the first digit."""


class HeadsRegion(Region):
    """A region whose first forward passes are compared with those of the full model.

    Args:
        owner: the module with the numbers of heads.
        layers: the column and row parallel layers.
        attention: the plan.

    Attributes:
        chosen: for training and for evaluation, after the first pass: the number of matrices in
            a column layer, one below the other, or None where the layers are gathered; and of
            tensors in the output.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: nn.Module,
        axis: Axis,
        layers: list[Any],
        attention: AttentionPlan,
    ) -> None:
        super().__init__(module, attention.name, axis)
        self.owner = owner
        self.layers = layers
        self.attention = attention
        self.full_counts: dict[str, int] = {key: getattr(owner, key) for key in attention.counts}
        self.chosen: dict[bool, tuple[int | None, int]] = {}
        self.set_parts(attention.fused)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.depth:  # its forward pass calls itself
            return super().__call__(*inputs, **options)
        is_training = self.module.training
        if is_training not in self.chosen:
            self.chosen[is_training] = self._choose_parts(inputs, options)
        parts, num_outputs = self.chosen[is_training]
        if parts is None:
            return self._forward_full(*gather_all(inputs), **gather_all(options))
        output = self._forward_sharded(parts, *inputs, **options)
        if sum(_tensor_mask(output)) != num_outputs:
            raise self._refusal(
                "its output has other parts than in its first forward pass, which were not "
                "compared with those of the whole"
            )
        return output

    def set_parts(self, parts: int | None) -> None:
        """Let each count be that of this rank's heads; of all heads if `parts` is None."""
        divisor = 1 if parts is None else self.axis.size
        for key, value in self.full_counts.items():
            setattr(self.owner, key, value // divisor)
        if parts is not None:
            for layer in self.layers:
                layer.parts = parts

    def _choose_parts(self, inputs: Any, options: Any) -> tuple[int | None, int]:
        """Return what `chosen` has for this mode, by the output of the full model. Collective.

        A forward pass may write into its inputs, into a cache say, or change its modules. So each
        pass that is only compared gets copies, and what it has changed is restored.
        """
        expected = self._attempt(self._forward_full, inputs, options)
        num_outputs = sum(_tensor_mask(expected))
        errors: list[StrategyRefused] = []
        for parts in sorted({self.attention.fused, 1}, reverse=True):
            try:
                forward = partial(self._forward_sharded, parts)
                self._compare(self._attempt(forward, inputs, options), expected)
            except StrategyRefused as error:
                errors.append(error)
            except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
                errors.append(self._refusal(f"its forward pass fails: {error}"))
            else:
                return parts, num_outputs
        if self.axis.rank == 0:
            name = re.sub(r"\d+", "*", self.name) or "the model"
            warnings.warn(
                f"tensor={self.axis.size}: {name} is stored in slices, but every rank gathers and "
                f"computes all of it, because {errors[0]}",
                stacklevel=2,
            )
        return None, num_outputs

    def _attempt(self, forward: Callable[..., Any], inputs: Any, options: Any) -> Any:
        """Run a forward pass of copies that leaves no trace. Collective."""
        inputs, options = copy_without_tensors((inputs, options))
        with torch.no_grad(), restored_modules(self.module):
            return forward(*inputs, **options)

    def _forward_sharded(self, parts: int, /, *inputs: Any, **options: Any) -> Any:
        self.set_parts(parts)
        with GlobalDropout(self.axis) if self.module.training else nullcontext():
            return super().__call__(*inputs, **options)

    def _forward_full(self, *inputs: Any, **options: Any) -> Any:
        """Compute with the full parameters, and put the shards back. Collective."""
        sharded_classes = [type(layer) for layer in self.layers]
        sharded_parameters = [dict(own_parameters(layer)) for layer in self.layers]
        parts, _ = self.chosen.get(self.module.training, (self.attention.fused, 0))
        for layer in self.layers:
            layer.__class__ = layer.full_class
            _gather_parameters(layer, self.axis)
        self.set_parts(None)
        self.depth += 1
        try:
            return type(self.module).forward(self.module, *inputs, **options)
        finally:
            self.depth -= 1
            self.set_parts(parts)
            for layer, sharded_class, parameters in zip(
                self.layers, sharded_classes, sharded_parameters, strict=True
            ):
                layer.__class__ = sharded_class
                own_parameters(layer).update(parameters)

    def _compare(self, output: Any, expected: Any) -> None:
        """Check that an output is that of the full model.

        Raises: StrategyRefused: it is another one, or that of this rank's heads.
        """
        if _tensor_mask(output) != _tensor_mask(expected) or not any(_tensor_mask(output)):
            raise self._refusal("its output has other parts than that of the whole")
        for actual, full in zip(tree_leaves(output), tree_leaves(expected), strict=True):
            if not isinstance(actual, Tensor):
                continue
            is_same_shape = actual.shape == full.shape
            error = _relative_error(actual.detach(), full) if is_same_shape else torch.inf
            if not error <= TOLERANCES.get(actual.dtype, 0.1):
                raise self._refusal(
                    f"its output is not that of the whole (relative difference {error:.1e})"
                )

    def _refusal(self, fact: str) -> StrategyRefused:
        return StrategyRefused(
            f"{self.name or 'the model'}: with its layers in slices {fact}. It does more with them "
            f"than their names tell. Keep it whole: tensor={self.axis.size},"
            f"whole={self.name or '...'}."
        )


def _gather_parameters(layer: nn.Module, axis: Axis) -> None:
    """Replace the layer's shards by full tensors, differentiable if gradients are. Collective."""
    parameters: dict[str, Any] = dict(own_parameters(layer))
    needs_gradients = torch.is_grad_enabled()
    for key, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            # Collectives must not receive into inference tensors.
            with torch.inference_mode(False), torch.set_grad_enabled(needs_gradients):
                parameters[key] = gathered_parameter(parameter, axis)
    own_parameters(layer).update(parameters)


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
