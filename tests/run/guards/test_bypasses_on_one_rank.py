"""What a script does past `run` on one rank: each works, or ends in an error with the cure."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from minimal_script import parts, quiet
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError

FLOAT = torch.float64


class Encoder(nn.Module):
    """A model whose parts are called by methods of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).double()
        self.head = nn.Linear(4, 3).double()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def prepared(model: nn.Module | None = None) -> tuple:
    run = quiet()
    model, optimizer, loader = run.prepare(*parts(model or Encoder()))
    x, y = next(iter(loader))
    return run, model, optimizer, x, y


def test_a_backward_through_a_method_or_a_submodule_is_an_error_and_writes_nothing() -> None:
    _, model, _, x, _ = prepared()
    for output in (model(x), model.encode(x), model.body(x)):
        with pytest.raises(UsageError, match=r"\.backward\(\).*test_bypasses_on_one_rank\.py:\d+"):
            output.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_parameters_are_refused_and_those_of_inputs_are_free() -> None:
    _, model, _, x, y = prepared()
    with pytest.raises(UsageError, match=r"autograd\.grad"):
        torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    x = x.clone().requires_grad_()
    (attack,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    assert attack.abs().sum() > 0


def test_a_copy_and_a_pickle_of_the_model_have_no_guards() -> None:
    _, model, _, x, _ = prepared()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(x).sum().backward()
        assert other.body.weight.grad is not None
        other.load_state_dict(model.state_dict())


def test_without_guards_a_bare_backward_passes() -> None:
    run = shoal.init(announce=lambda _: None, guards=False)
    model, _, loader = run.prepare(*parts())
    x, _ = next(iter(loader))
    model(x).sum().backward()
    assert model.weight.grad is not None


def test_evaluation_in_inference_mode_leaves_training_as_it_is() -> None:
    run, model, optimizer, x, y = prepared()
    with torch.inference_mode():
        model(x)
    run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    optimizer.step()


def test_state_of_an_optimizer_goes_on_when_it_was_loaded_before_prepare() -> None:
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4, dtype=FLOAT)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    quiet().prepare(model, optimizer)
    assert torch.equal(
        optimizer.state[model.weight]["momentum_buffer"], torch.ones(3, 4, dtype=FLOAT)
    )
