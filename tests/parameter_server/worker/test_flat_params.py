"""A model's parameters and gradients, flat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.flat_params import FlatParams


def flat_of(parameter: nn.Parameter) -> FlatParams:
    """In two parts."""
    length = parameter.numel()
    shape = ParamMeta(length, parameter.dtype, 0)
    return FlatParams(
        {"weight": parameter}, partition({"weight": shape}, length * parameter.itemsize // 2)
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_that_lies_like_its_parameter_is_read_where_it_is(memory_format):
    numbers = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(
        memory_format=memory_format
    )
    flat = flat_of(nn.Parameter(numbers))
    gradient = torch.empty_like(numbers).copy_(numbers)
    for part, values in zip(flat.parts, flat.values, strict=True):
        found = flat.flat_gradient_or_none(part.segments[0], gradient)
        assert found is not None
        assert torch.equal(found, values)
        assert found.data_ptr() == gradient.data_ptr() + part.segments[0].start * gradient.itemsize


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(4, 6).T,
        torch.randn(6, 1).expand(6, 4),
        torch.randn(12, 4)[::2],
        torch.randn(6, 4, dtype=torch.float64),
        torch.randn(6, 4).to_sparse(),
        torch.imag(
            torch.randn(6, 4, dtype=torch.complex64).conj()
        ),  # the negative of what lies there
        torch._efficientzerotensor((6, 4)),
    ],
    ids=[
        "transposed",
        "expanded",
        "with gaps",
        "of another dtype",
        "sparse",
        "negative",
        "no numbers at all",
    ],
)
def test_a_gradient_that_lies_otherwise_has_to_be_copied(gradient: Tensor):
    flat = flat_of(nn.Parameter(torch.zeros(6, 4)))
    assert flat.flat_gradient_or_none(flat.parts[0].segments[0], gradient) is None


def test_a_gradient_that_is_to_be_conjugated_has_to_be_copied():
    flat = flat_of(nn.Parameter(torch.zeros(6, 4, dtype=torch.complex64)))
    gradient = torch.randn(6, 4, dtype=torch.complex64)
    assert flat.flat_gradient_or_none(flat.parts[0].segments[0], gradient) is not None
    assert flat.flat_gradient_or_none(flat.parts[0].segments[0], gradient.conj()) is None


def test_plain_numbers_of_an_optimizers_state_stay_numbers():
    flat = flat_of(nn.Parameter(torch.zeros(6, 4)))
    state = {"count": 3, "step": torch.tensor(2.0), "mean": torch.arange(24.0).view(6, 4)}
    found = flat.gather("weight", dict(enumerate(flat.scatter(lambda _: state))))
    assert (found["count"], found["step"]) == (3, 2.0)
    assert torch.equal(found["mean"], state["mean"])
