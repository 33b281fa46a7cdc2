"""Layers that write their own weights in the forward pass are refused where it has a copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import UsageError
from shoal.testing import world


class Normalised(nn.Linear):
    """Divides its rows by their norms in place, as embeddings of knowledge graphs are."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))
        return super().forward(x)


class Entities(nn.Module):
    """Writes the vectors of a table inside before it looks them up."""

    def __init__(self, _: int, features: int) -> None:
        super().__init__()
        self.table = nn.Embedding(9, features)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.weight.data.div_(self.table.weight.data.norm(dim=1, keepdim=True))
        return self.table((8 * x[:, 0].abs()).long())


class Binary(nn.Linear):
    """Computes with the signs of its weights, in their place."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.sign()
        return super().forward(x)


class BinaryCopy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.sign() * self.weight, self.bias)


def errors_of(strategy: str, layers: list[type[nn.Module]], form: str) -> list[str]:
    return [error_of(strategy, layer, form) for layer in layers]


def error_of(strategy: str, layer: type[nn.Module], form: str) -> str:
    """Train a layer; return the error, or ""."""
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    model = layer(6, 4).double()
    if issubclass(layer, nn.Linear):
        model = nn.Sequential(nn.Linear(6, 8), layer(8, 4), nn.Linear(4, 2)).double()
    loader = DataLoader(torch.arange(48, dtype=torch.float64).view(8, 6).sin(), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    try:
        for x in loader:
            optimizer.zero_grad()
            if form == "function":
                run.forward_backward(lambda x: model(x).square().mean(), x)
            else:
                run.backward(model(x).square().mean())
            optimizer.step()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "form"),
    [pytest.param("zero1", "function", marks=pytest.mark.slow), ("zero3", "loop")],
)
def test_a_layer_that_writes_its_weight_is_refused_where_the_weight_is_in_shards(
    strategy: str, form: str
) -> None:
    layers = {Normalised: "1", Binary: "1", Entities: "table"}
    for texts in world.run(2, errors_of, strategy, [*layers], form):
        for text, name in zip(texts, layers.values(), strict=True):
            assert text.startswith(f"{name}.weight is written by a forward pass")


def test_a_layer_that_computes_with_another_value_is_not() -> None:
    assert world.run(2, error_of, "zero3", BinaryCopy, "loop") == ["", ""]


def test_a_layer_that_writes_its_weight_goes_on_where_ranks_hold_it() -> None:
    assert world.run(2, error_of, "ddp", Normalised, "function") == ["", ""]
