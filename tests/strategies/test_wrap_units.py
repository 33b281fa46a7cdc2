"""Wrap units: the modules that are gathered or recomputed together."""

import pytest
from torch import Tensor, nn

from shoal.models import build
from shoal.strategies.wrap_units import units


def test_the_layers_of_a_transformer_are_its_units() -> None:
    gpt = build("gpt", 17, (13,), {"width": 8, "layers": 3, "heads": 2})
    assert list(units(gpt)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_blocks_of_a_cnn_are_its_units_and_tiny_ones_stay_outside() -> None:
    names = list(units(build("resnet50", 10, (3, 32, 32), {})))
    assert names[0] == "layer1.1" or names[0] == "layer2.0"
    assert {"layer3.0", "layer3.5", "layer4.2"} < set(names)
    assert all(name.startswith("layer") for name in names)


def test_recurrent_layers_are_units() -> None:
    assert list(units(build("lstm", 17, (13,), {"width": 32, "layers": 2}))) == [
        "layers.0",
        "layers.1",
    ]


def test_a_large_unit_is_cut_finer() -> None:
    backbone = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model = nn.Sequential(backbone, nn.Linear(50, 10))
    assert list(units(model)) == ["0", "0.0", "0.1", "1"]


def test_the_members_of_a_list_of_lists_are_found() -> None:
    model = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), "b": nn.Linear(3, 3)}
    )
    assert list(units(model)) == ["a.0", "a.1", "b"]


def test_what_shares_a_parameter_with_another_module_is_no_unit() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.layers[2].weight = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert list(units(Tied())) == ["layers.1"]
    assert list(units(Tied(), "Linear")) == ["layers.1"]


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own, self.again = shared, nn.Linear(4, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.own(self.shared(x))
        return output


def test_blocks_that_hold_the_same_module_are_no_units() -> None:
    shared = nn.Linear(4, 4)
    blocks = nn.ModuleList([Block(shared), Block(shared), Block(nn.Linear(4, 4))])
    assert list(units(blocks)) == ["2"]
    assert list(units(blocks, "Block")) == ["2"]
    assert list(units(blocks, "Linear")) == ["0.shared", "0.own", "1.own", "2.shared", "2.own"]


def test_a_unit_that_stands_in_two_places_is_one() -> None:
    block, other = Block(nn.Linear(4, 4)), nn.Linear(4, 4)
    assert list(units(nn.ModuleList([block, block, other]))) == ["0", "2"]
    assert list(
        units(nn.ModuleDict({"a": nn.ModuleList([block, other]), "b": nn.ModuleList([block])}))
    ) == [
        "a.0",
        "a.1",
    ]


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.ReLU(), nn.Sequential()])
def test_a_model_without_blocks_has_no_unit(model: nn.Module) -> None:
    assert units(model) == {}
