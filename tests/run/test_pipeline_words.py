"""What a pipeline cannot do is told in words of its own, with a cure, and not in torch's."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.errors import ShoalError
from shoal.testing import world


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    kinds = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*kinds).double()


def trained(model: nn.Module) -> str:
    run = shoal.init("pipeline=2", announce=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    x = torch.arange(24.0).double().view(4, 6) / 24
    try:
        run.forward_backward(lambda x: F.softplus(model(x)).mean(), x)
        optimizer.step()
    except ShoalError as error:
        return str(error)
    return ""


def with_spectral_norm() -> str:
    hooked = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in hooked[::2]:
            torch.nn.utils.spectral_norm(layer)
    return trained(hooked)


@pytest.mark.slow
def test_a_hook_that_writes_buffers_is_refused_in_our_words() -> None:
    for refusal in world.run(2, with_spectral_norm):
        assert re.search(r"writes into the buffer 0\.weight_[uv]", refusal)
