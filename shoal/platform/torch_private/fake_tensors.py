"""Tensors with shapes and without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

# Why: operators on `meta` choose other kernels than on the CPU (attention in particular), and so
# keep other activations. Without: plans count the activations of attention that keeps its scores.
# Checked: 2.11, 2.13, 2.15.
VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of code that asks for a value of a tensor without memory."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which operators compute shapes, and no tensor that is made has memory.

    Why, without and checked: see VALUE_NEEDED.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def attention_flops() -> Mapping[Any, Callable[..., int]]:
    """Return the operations of the CPU's attention kernel, which `flop_counter` does not know.

    Two matrix products forward: scores and their product with the values. Backward five: the
    scores again, and two gradients of each product (Dao et al., FlashAttention, 2022).

    Why: the operator has a private name. Without: attention on the CPU costs nothing in a plan.
    Checked: 2.11, 2.13, 2.15.
    """
    aten = torch.ops.aten

    def product(q: Any, k: Any) -> int:
        """Return the operations of one product of (batch, heads, queries, keys)."""
        batch, heads, queries, width = q
        return int(2 * batch * heads * queries * k[2] * width)

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 2 * product(q, k),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda _, q, k, *__, **___: 5 * product(q, k)
        ),
    }
