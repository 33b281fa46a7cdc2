"""Tensors with shapes and without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

# Why: operators on `meta` choose other kernels than on the CPU (attention in particular), and so
# keep other activations. Without: plans count the activations of attention that keeps its scores.
# Checked: 2.11, 2.13, 2.15.
VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of code that asks for a value of a tensor without memory."""


@cache
def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which operators compute shapes, and no tensor that is made has memory.

    It is one for the process, for tensors of two such contexts cannot meet.

    Why, without and checked: see VALUE_NEEDED.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def weights_without_memory() -> Iterator[None]:
    """Let every parameter that a module registers in this context have no memory.

    One that two modules share stays one. `Module.to` is replaced too, for torch would swap such
    parameters with what they are converted to, and cannot where nothing changes.

    Why: torch builds modules on `meta` from factory functions alone, and an initial value that is
    computed of others then fails. Without: a plan of a script needs memory for its weights.
    Checked: 2.11, 2.13.
    """
    register, apply = nn.Module.register_parameter, nn.Module._apply

    def stand_in(weight: Any, made: Tensor) -> nn.Parameter:
        """Return what stands for a weight: one object, for all modules that have it."""
        if not hasattr(weight, "_stand_in"):
            weight._stand_in = nn.Parameter(made, weight.requires_grad)
        found: nn.Parameter = weight._stand_in
        return found

    def register_without(module: nn.Module, name: str, weight: Any) -> None:
        is_other = isinstance(weight, FakeTensor | nn.UninitializedParameter)
        if isinstance(weight, nn.Parameter) and not is_other:
            with fake_tensors():
                weight = stand_in(weight, torch.empty(weight.shape, dtype=weight.dtype))
        register(module, name, weight)

    def convert(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, weight in module._parameters.items():
            if weight is not None:
                with torch.no_grad():
                    converted = function(weight)
                if (converted.dtype, converted.device) != (weight.dtype, weight.device):
                    module._parameters[name] = stand_in(weight, converted)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    nn.Module.register_parameter = register_without  # type: ignore[method-assign,assignment]
    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module._apply = apply  # type: ignore[method-assign]


def kernel_flops() -> Mapping[Any, Callable[..., int]]:
    """Return the operations of the CPU's kernels that `flop_counter` does not know.

    Attention: two matrix products forward, scores and their product with the values. Backward five:
    the scores again, and two gradients of each product (Dao et al., FlashAttention, 2022). A layer
    of an LSTM: products with both of its matrices forward, and two gradients of each.

    Why: the operators have private names. Without: attention and LSTMs on the CPU cost nothing in a
    plan. Checked: 2.11, 2.13, 2.15.
    """
    aten = torch.ops.aten

    def product(q: Any, k: Any) -> int:
        """Return the operations of one product of (batch, heads, queries, keys)."""
        batch, heads, queries, width = q
        return int(2 * batch * heads * queries * k[2] * width)

    def lstm(x: Any, w: Any, v: Any) -> int:
        """Return the operations of both products of (time, batch, inputs) in a layer."""
        return int(2 * x[0] * x[1] * w[0] * (w[1] + v[1]))

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 2 * product(q, k),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda _, q, k, *__, **___: 5 * product(q, k)
        ),
        aten.mkldnn_rnn_layer: lambda x, w, v, *_, **__: lstm(x, w, v),
        aten.mkldnn_rnn_layer_backward: lambda x, w, v, *_, **__: 2 * lstm(x, w, v),
    }
