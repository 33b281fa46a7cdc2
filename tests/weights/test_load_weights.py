"""`shoal.load_weights`: files of one model into another, with memory and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Tied(nn.Module):
    """A model whose head has the weight of its embedding."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, hidden)
        self.layers = nn.Sequential(nn.Linear(hidden, 8), nn.Tanh(), nn.Linear(8, hidden))
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return scores


def saved(directory: Path) -> dict[str, Tensor]:
    """Write a model in two files with an index, as transformers does; return what it holds."""
    torch.manual_seed(7)
    model = Tied()
    nn.init.normal_(model.norm.running_mean)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["head.weight"]  # files have one name of a tied weight
    names = sorted(state)
    where = {name: PARTS[number % 2] for number, name in enumerate(names)}
    for part in PARTS:
        save_file({name: state[name] for name in names if where[name] == part}, directory / part)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return state


def loaded(strategy: str, directory: Path, empty: bool) -> dict[str, Tensor]:
    run = shoal.init(strategy=strategy, announce=str)
    if empty:
        with shoal.empty_weights():
            model = Tied()
    else:
        model = Tied()
    shoal.load_weights(model, directory)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.head.weight is model.embedding.weight
    if strategy.startswith("pipeline"):  # it is divided in the first step
        tokens = run.share(torch.arange(6))
        run.forward_backward(lambda x: F.cross_entropy(model(x), x), tokens)
    weights: dict[str, Tensor] = run.weights()
    return weights


@pytest.mark.parametrize(
    ("ranks", "strategies"), [(1, ["single"]), (2, ["zero3", "tensor=2", "server=1", "pipeline=2"])]
)
def test_a_model_gets_what_is_in_the_files(
    tmp_path: Path, ranks: int, strategies: list[str]
) -> None:
    state = saved(tmp_path)
    calls = [(strategy, tmp_path, empty) for strategy in strategies for empty in (True, False)]
    for results in world.run(ranks, in_turn, loaded, *calls):
        for weights, (strategy, *_) in zip(results, calls, strict=True):
            for name, value in state.items():
                assert torch.equal(weights[name], value), (strategy, name)


def test_values_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    half = nn.Linear(3, 2, dtype=torch.bfloat16)
    shoal.load_weights(half, tmp_path)
    assert torch.equal(half.weight, layer.weight.bfloat16())


def test_all_differences_are_in_one_error(tmp_path: Path) -> None:
    state = saved(tmp_path)
    with pytest.raises(UsageError) as caught:
        shoal.load_weights(nn.Sequential(Tied(5)), tmp_path)
    text = str(caught.value)
    assert "0.embedding.weight is not in the file" in text
    assert all(f"the model has no {name}" in text for name in state)
    with pytest.raises(UsageError) as caught:
        shoal.load_weights(Tied(5), tmp_path)
    wrong = "embedding.weight has shape (6, 4); the model's has (6, 5)"
    assert wrong in str(caught.value)
    assert str(caught.value).count("has shape") == 8


def test_without_strict_what_is_not_there_stays_as_it_is(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 2), "other": torch.ones(1)}, tmp_path / "a.safetensors")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[1].weight.clone()
    shoal.load_weights(model, tmp_path / "a.safetensors", strict=False)
    assert torch.equal(model[0].weight, torch.ones(2, 2))
    assert torch.equal(model[1].weight, before)
    with pytest.raises(UsageError, match="no name is the same"):
        shoal.load_weights(nn.Linear(2, 2), tmp_path / "a.safetensors", strict=False)


def test_without_strict_the_rest_is_initialized(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with shoal.empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shoal.load_weights(model, tmp_path, strict=False)
    run = shoal.init(announce=str)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model[0].weight, torch.ones(2, 2))
    assert 0 < model[1].weight.abs().max() <= 2**-0.5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", "", "has neither model.safetensors nor model.safetensors.index.json"),
        ("model.safetensors", "no header", "model.safetensors cannot be read"),
        ("model.safetensors.index.json", "{}", "is no index of weights"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"weight": "../x.safetensors"}}',
            "names ../x.safetensors, outside of its directory",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"weight": "x.safetensors"}}',
            "x.safetensors cannot be read: No such file or directory",
        ),
    ],
)
def test_files_that_are_none_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        shoal.load_weights(nn.Linear(2, 2), tmp_path)
