"""A copy of a prepared model is a plain model, as an average of weights needs it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.run.supervised import supervised
from shoal.testing import world
from tests.harness.in_turn import in_turn


def prepared(
    strategy: str = "ddp",
) -> tuple[shoal.Run, nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    run, model = (
        shoal.init(strategy, announce=lambda _: None),
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    return run, *run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)


def averaged(strategy: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return torch's average of the weights, and the same computed by hand."""
    run, model, optimizer, loader = prepared(strategy)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    by_hand = [p.detach().clone() for p in model.parameters()]
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
        run.wait()
        average.update_parameters(model)
        for mean, parameter in zip(by_hand, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.5 if step else 1.0)
    return [p.detach() for p in average.parameters()], by_hand


def test_an_average_of_weights_by_torch_is_that_by_hand() -> None:
    for by_ddp, by_server in world.run(2, in_turn, averaged, ("ddp",), ("server",)):
        assert all(torch.equal(*pair) for pair in zip(*by_ddp, strict=True))
        assert all(torch.equal(*pair) for pair in zip(*by_server, strict=True))


def copied_between_steps() -> tuple[Tensor, Tensor, Tensor]:
    run, model, optimizer, loader = prepared()
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    twin, x = copy.deepcopy(model), torch.ones(1, 4)
    before = model(x).detach()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    return before, model(x).detach(), twin(x).detach()


def test_a_copy_has_weights_of_its_own() -> None:
    for before, after, twin in world.run(2, copied_between_steps):
        assert torch.equal(before, after)
        assert torch.equal(twin, torch.zeros(1, 3))


def copied_with_gradients() -> tuple[list[bool], list[bool]]:
    """Tell which gradients of slices are there, and in a copy. The copy has weights of its own."""
    run, model, _, loader = prepared("tensor=2")
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)
        for parameter in twin.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
        assert torch.equal(model(x), before)
        assert not twin(x).any()
    kept = [parameter.grad is not None for parameter in model.parameters()]
    return kept, [parameter.grad is not None for parameter in copy.deepcopy(twin).parameters()]


def test_a_copy_of_shards_has_no_gradients_as_no_copy_of_a_parameter_has() -> None:
    for kept, copied in world.run(2, copied_with_gradients):
        assert all(kept)
        assert not any(copied)


def compared_with_former_weights(strategy: str) -> list[str]:
    _, model, _, _ = prepared(strategy)
    former = torch.zeros(8, 4)
    weight = model[0].weight
    found = []
    for compare in (
        lambda: F.mse_loss(weight, former),
        lambda: F.l1_loss(former, weight),
        lambda: former == weight,
        lambda: former.sub(weight),
        lambda: torch.maximum(weight, former),
    ):
        with pytest.raises(UsageError) as raised:
            compare()
        found.append(str(raised.value))
    assert torch.equal(former, former.clone())
    return found


def test_a_shard_that_is_compared_with_a_whole_tensor_is_refused_with_the_cure() -> None:
    for results in world.run(2, in_turn, compared_with_former_weights, ("zero3",), ("tensor=2",)):
        for text in (*results[0], *results[1]):
            assert "that part was combined with a whole tensor" in text
            assert "run.weights()" in text
            assert "test_model_copies.py" in text
