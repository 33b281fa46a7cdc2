"""`gather=bf16`: what is gathered is bfloat16, what is stepped is float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ConfigError, ShoalError, StrategyRefused
from shoal.testing import world
from tests.harness.in_turn import in_turn

WIDTH = 16


def matrices() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def with_norms() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))


MODELS = {each.__name__: each for each in (matrices, with_norms, with_batchnorm)}


def trained(
    strategy: str, kind: str, precision: str = "bf16"
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Return the weights after some steps, and the dtypes that were gathered in them."""
    # A trial would run the whole model, in this process where no child can differentiate.
    run = shoal.init(strategy, precision=precision, guards=False, announce=str)
    torch.manual_seed(0)
    model = MODELS[kind]()
    data = TensorDataset(torch.randn(32, WIDTH), torch.randint(0, 4, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    gathered = set()

    def look(module: nn.Module, _inputs: object, _output: object) -> None:
        gathered.add(module.weight.dtype)

    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    first.register_forward_hook(look)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    return dict(run.weights()), gathered


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_matrices_train_to_the_bits_of_float32_that_autocast_rounds(strategy: str) -> None:
    calls = (strategy, "matrices"), (f"{strategy},gather=bf16", "matrices")
    (expected, wide), (weights, narrow) = world.run(2, in_turn, trained, *calls)[0]
    assert wide == {torch.float32}
    assert narrow == {torch.bfloat16}
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.slow
def test_norms_are_rounded_too_and_stay_near() -> None:
    calls = ("zero3", "with_norms"), ("zero3,gather=bf16", "with_norms")
    (expected, _), (weights, _) = world.run(2, in_turn, trained, *calls)[0]
    apart = max((weights[name] - weight).abs().max() for name, weight in expected.items())
    assert 0 < apart < 2**-8


def test_it_is_refused_where_a_step_computes_in_float32_or_has_batchnorm() -> None:
    for kind, precision, message in (
        ("matrices", "fp32", 'Let the step compute in bfloat16, by precision="bf16"'),
        ("with_batchnorm", "bf16", "BatchNorm takes weights in the dtype of its statistics"),
    ):
        with pytest.raises(ShoalError, match=message):
            world.run(2, trained, "zero3,gather=bf16", kind, precision)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="gather=fp8: must be bf16"):
        shoal.init("zero3,gather=fp8")


@pytest.mark.slow
def test_a_pipeline_refuses_it() -> None:
    with pytest.raises((StrategyRefused, ShoalError), match="Leave out hybrid, offload and gather"):
        world.run(4, trained, "pipeline=2,zero1,gather=bf16", "matrices")
