"""Gradients on several devices: offloaded shards lie on the CPU, scalars beside them do not.

The device `meta` stands for the other one: an operation of tensors on two devices is an error.
"""

import pytest
import torch
from torch import nn

from shoal.comm.norm import global_norm
from shoal.strategies.grad_checks import read, sums_of
from shoal.strategies.local_step import scale_gradients
from shoal.strategies.single import single_device


def test_gradients_on_two_devices_have_one_norm() -> None:
    tensors = [torch.ones(3, device="meta"), torch.ones(2), torch.ones(4, device="meta")]
    assert global_norm(tensors).device.type == "meta"
    assert global_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5


def test_gradients_on_two_devices_are_scaled_by_one_factor() -> None:
    model = nn.Module()
    model.here, model.there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scale_gradients(single_device(model), torch.tensor(0.5))
    torch.testing.assert_close(model.here.weight.grad, torch.full((2, 2), 0.5))


def test_gradients_on_the_cpu_and_on_a_device_are_summed_apart() -> None:
    on_device = torch.ones(3, device="meta")  # has no numbers: to read one is an error
    here, there = sums_of([on_device, torch.tensor([1.0, torch.nan])])
    assert here.isnan()
    assert there.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        read([here, there])
