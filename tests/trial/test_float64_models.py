"""Models compute in float64 for a trial, and autograd keeps what it knows of their parameters."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.trial.float64_models import models_in_float64


def accumulate_node(parameter: Tensor) -> Any:
    graph = parameter.expand_as(parameter).grad_fn
    assert graph is not None
    return graph.next_functions[0][0]


def test_hooks_of_the_node_that_accumulates_a_gradient_stay() -> None:
    model = nn.Linear(3, 2)
    node, seen = accumulate_node(model.weight), []
    node.register_hook(lambda *_: seen.append("reduced"))
    with models_in_float64([model]) as copy_of:
        loss = model(torch.ones(4, 3)).sum()
        torch.autograd.grad(loss, [copy_of(model.weight)])
    assert not seen
    model(torch.ones(4, 3)).sum().backward()
    assert seen == ["reduced"]


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated, and users have it
        return torch.jit.script(nn.Linear(3, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        lambda: nn.LSTM(3, 2, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        scripted,
    ],
    ids=["linear", "buffers", "flat weights", "parametrized", "script"],
)
def test_a_model_computes_in_float64_inside_and_has_its_own_tensors_after(
    make: Callable[[], Any],
) -> None:
    model = make()
    model.eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    held = dict(model.named_parameters())
    with models_in_float64([model]):
        output = model(torch.rand(4, 3))
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype is torch.float64
    assert all(held[name] is parameter for name, parameter in model.named_parameters())
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(tensor, before[name][1])
    assert torch.get_default_dtype() is torch.float32


def test_weights_that_a_closure_holds_are_in_float64_too_and_keep_their_marks() -> None:
    model = nn.Linear(3, 2)
    weight, weights = model.weight, list(model.parameters())
    weight.decays = True  # type: ignore[attr-defined]
    with models_in_float64([model]) as copy_of:
        penalty = weight.square().sum() + torch.cat([each.flatten() for each in weights]).sum()
        assert model.weight.decays
        assert weight.dtype is torch.float64
        (gradient,) = torch.autograd.grad(penalty, [copy_of(weight)])
    assert penalty.dtype is gradient.dtype is torch.float64
    assert torch.allclose(gradient, 2 * weight.double() + 1)


def test_what_a_pass_writes_stays_in_the_copies() -> None:
    model = nn.BatchNorm1d(3)
    assert model.running_mean is not None
    with models_in_float64([model]), torch.no_grad():
        model(torch.rand(4, 3))
        model.weight.fill_(7.0)
    assert torch.equal(model.weight, torch.ones(3))
    assert torch.equal(model.running_mean, torch.zeros(3))
