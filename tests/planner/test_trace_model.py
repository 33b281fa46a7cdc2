"""The work of a model, counted without memory, beside what real tensors hold and compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.accounting import Peak
from shoal.costs.cluster import one_host
from shoal.costs.machine import UNKNOWN_CPU
from shoal.costs.memory_peak import peak
from shoal.costs.work import ModelWork
from shoal.errors import UsageError
from shoal.models import build
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model

SHAPES: dict[str, Any] = {
    "mlp": ((1, 8, 8), {"hidden": [64, 64]}),
    "residual_cnn": ((1, 8, 8), {"widths": [16, 32]}),
    "gpt": ((16,), {"width": 32, "layers": 3, "heads": 4}),
}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def model_and_loss(name: str, samples: int) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    shape, options = SHAPES[name]
    model = build(name, 16, shape, options)
    is_text = len(shape) == 1
    x = torch.randint(0, 16, (samples, *shape)) if is_text else torch.randn(samples, *shape)
    y = torch.randint(0, 16, (samples, *shape)) if is_text else torch.randint(0, 16, (samples,))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    return model, loss, (x, y)


@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_of_one_device_is_that_of_its_tensors(name: str) -> None:
    samples = 256
    model, loss, batch = model_and_loss(name, samples)
    work = trace_model(model, loss, adamw, batch)
    step = Planner(Workload(work, model, samples), UNKNOWN_CPU, one_host(1, 2.0**40)).step_cost(
        "single"
    )
    predicted = peak(step).total - work.buffer_bytes

    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    parameters = [*model.parameters()]
    state = [value for p in parameters for value in optimizer.state[p].values()]
    with Peak(parameters, [*state, *batch], torch.device("cpu")) as held:
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    assert predicted == pytest.approx(held.peak_bytes, rel=0.01)


def test_a_linear_layer_has_the_operations_of_the_formula() -> None:
    model = nn.Linear(8, 4, bias=False)
    work = trace_model(model, lambda x: model(x).sum(), adamw, (torch.zeros(1, 8),))
    # y = x W: 2 b i o; backward one product, for the data needs no gradient.
    assert work.flops(3) == 2 * (2 * 3 * 8 * 4)
    assert work.input_bytes.at(3) == 4 * 3 * 8
    (weight,) = work.parameters
    assert (weight.name, weight.shape, weight.nbytes) == ("weight", (4, 8), 128)
    assert weight.optimizer_bytes == 2 * 128 + 4  # two moments, and a count of steps


@pytest.mark.slow
def test_an_lstm_computes_the_products_of_one_element_after_another() -> None:
    layer = nn.LSTM(8, 16, batch_first=True)
    work = trace_model(layer, lambda x: layer(x)[0].sum(), adamw, (torch.zeros(2, 5, 8),))
    ops = [op for part in work.segments for op in (*part.forward, *part.backward) if op.flops.slope]
    assert {op.kind for op in ops} == {"matmul"}
    assert work.flops(3) == 3 * (2 * 3 * 5 * 64 * (8 + 16))


def test_every_parameter_belongs_to_the_segment_that_uses_it_first() -> None:
    work = traced("gpt")
    named = [name for segment in work.segments for name in segment.parameters]
    assert sorted(named) == sorted(parameter.name for parameter in work.parameters)
    owners = {name: segment.path for segment in work.segments for name in segment.parameters}
    assert all(name.startswith(path) for name, path in owners.items())


def traced(name: str) -> ModelWork:
    model, loss, batch = model_and_loss(name, 2)
    return trace_model(model, loss, adamw, batch)


def test_the_model_is_left_as_it_was() -> None:
    model, loss, batch = model_and_loss("mlp", 2)
    model.eval()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    trace_model(model, loss, adamw, batch)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_an_optimizer_that_reads_values_has_its_states_counted() -> None:
    model = nn.Linear(8, 4)
    work = trace_model(
        model,
        lambda x: model(x).sum(),
        lambda module: torch.optim.Adafactor(module.parameters()),
        (torch.zeros(1, 8),),
    )
    rows_and_columns = {p.name: p.optimizer_bytes for p in work.parameters}
    assert rows_and_columns == {"weight": 4 * (8 + 4) + 4, "bias": 4 * 4 + 4}


def test_a_model_that_asks_for_values_is_refused_with_the_reason() -> None:
    model = nn.Linear(2, 1)

    def loss(x: Tensor) -> Tensor:
        return model(x).sum() * (1.0 if x.sum().item() > 0 else 2.0)

    with pytest.raises(UsageError, match="asks for the value of a tensor"):
        trace_model(model, loss, adamw, (torch.zeros(1, 2),))


def test_a_model_that_fails_is_refused_with_its_own_error() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="fails with RuntimeError"):
        trace_model(model, lambda x: model(x).sum(), adamw, (torch.zeros(1, 3),))


def test_a_model_that_no_memory_could_hold_is_counted() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(2)))
    work = trace_model(model, lambda x: model(x).sum(), adamw, (torch.zeros(1, 1 << 17),))
    assert work.numel == 2 * (1 << 34)
