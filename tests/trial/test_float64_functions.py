"""Functions of torch compute in float64 for a trial, and the weights stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.trial.float64_functions import Float64Functions


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        lambda: nn.LSTM(3, 2, batch_first=True),
        lambda: nn.MultiheadAttention(3, 1),
        lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    ],
    ids=["linear", "buffers", "flat weights", "attention", "encoder", "parametrized"],
)
def test_a_model_computes_in_float64_and_has_gradients_in_its_own_dtype(
    make: Callable[[], Any],
) -> None:
    model = make()
    before = {name: (t, t.clone(), t._version) for name, t in model.state_dict().items()}
    inputs = (torch.rand(4, 3),) * (3 if isinstance(model, nn.MultiheadAttention) else 1)

    def output() -> torch.Tensor:
        found: Any = model(*inputs)
        return found[0] if isinstance(found, tuple) else found

    model.eval()
    expected = torch.autograd.grad(output().square().sum(), [*model.parameters()])
    with Float64Functions():
        found = output()
        gradients = torch.autograd.grad(found.square().sum(), [*model.parameters()])
    assert found.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype is torch.float32
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0].data_ptr()
        assert (tensor.dtype, tensor._version) == (before[name][1].dtype, before[name][2])
        assert torch.equal(tensor, before[name][1])


def test_a_weight_that_a_closure_holds_is_given_as_float64() -> None:
    weight = nn.Linear(3, 2).weight
    with Float64Functions():
        penalty = weight.square().sum() + torch.cat([weight.flatten()]).sum()
        (gradient,) = torch.autograd.grad(penalty, [weight])
    assert penalty.dtype is torch.float64
    assert torch.allclose(gradient, 2 * weight + 1)


def test_the_default_dtype_is_put_back_where_a_layer_is_recomputed_inside() -> None:
    functions = Float64Functions()
    with functions, functions:
        assert torch.get_default_dtype() is torch.float64
    assert torch.get_default_dtype() is torch.float32
