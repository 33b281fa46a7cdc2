"""The files of `run.save` and `run.save_pretrained`, under strategies that divide a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import CheckpointError, LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

STRATEGIES = ("ddp", "zero3", "tensor=2", "pipeline=2", "server=1")


class Tied(nn.Module):
    """Four layers of 8; the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (nn.Linear(8, 8).double() for _ in range(4))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        out: Tensor = self.last(hidden)
        return out

    def save_pretrained(
        self, directory: Path, state_dict: dict[str, Tensor], suffix: str = ""
    ) -> None:
        """Write as a model of transformers does: the weights that it is given."""
        directory.mkdir(exist_ok=True)
        save_file(
            {n: v.contiguous().clone() for n, v in state_dict.items()}, directory / f"m{suffix}"
        )


class TwoPlaces(nn.Module):
    """A layer that has two names, and so twice as many in the `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(3))
        self.again = self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.again):
            x = layer(x).tanh()
        return x


class Full(Tied):
    def save_pretrained(self, directory: Path, state_dict: dict[str, Tensor]) -> None:
        raise OSError(28, "No space left on device")


def trained(strategy: str, *models: nn.Module) -> shoal.Run:
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    parameters = {p: None for model in models for p in model.parameters()}
    data = TensorDataset(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double())
    *_, optimizer, loader = run.prepare(
        *models, torch.optim.SGD(list(parameters), lr=0.1), DataLoader(data, 8)
    )
    for (x,) in loader:
        run.forward_backward(lambda x: sum(m(x).square().mean() for m in models), x)
        optimizer.step()
    return run


def saved(strategy: str, directory: Path) -> dict[str, Tensor]:
    run = trained(strategy, Tied())
    run.save(directory / "model.safetensors")
    run.save(directory / "model.pt")
    run.save_pretrained(directory / "pretrained", suffix=".safetensors")
    return run.weights()


def saved_with_two_names(strategy: str, directory: Path) -> None:
    trained(strategy, TwoPlaces()).save(directory / "model.pt")


def test_a_layer_of_two_names_is_saved_under_both_by_stages(tmp_path: Path) -> None:
    world.run(2, saved_with_two_names, "pipeline=2", tmp_path)
    found = torch.load(tmp_path / "model.pt")
    assert set(found) == set(TwoPlaces().state_dict())
    assert torch.equal(found["again.weight"], found["layers.0.weight"])


def test_both_formats_and_the_models_own_hold_the_whole_weights(tmp_path: Path) -> None:
    directories = [tmp_path / strategy for strategy in STRATEGIES]
    for directory in directories:
        directory.mkdir()
    found, _ = world.run(2, in_turn, saved, *zip(STRATEGIES, directories, strict=True))
    for expected, directory in zip(found, directories, strict=True):
        for file in ("model.safetensors", "pretrained/m.safetensors"):
            written = load_file(directory / file)
            assert written.keys() == expected.keys()
            assert all(torch.equal(written[name], value) for name, value in expected.items())
        written = torch.load(directory / "model.pt", weights_only=True)
        assert all(torch.equal(written[name], value) for name, value in expected.items())
        Tied().load_state_dict(load_file(directory / "model.safetensors"))
        assert not list(directory.glob("*.tmp"))


def test_a_dtype_that_the_format_lacks_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).double()
    model.register_buffer("codes", torch.zeros(2, dtype=torch.uint16))
    run = trained("single", model)
    with pytest.raises(CheckpointError, match=r"does not know torch\.uint16"):
        run.save(tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_models_is_saved_under_its_own_names(tmp_path: Path) -> None:
    first, second = Tied(), nn.Linear(8, 8).double()
    run = trained("single", first, second)
    run.save_pretrained(tmp_path, suffix=".safetensors")
    assert load_file(tmp_path / "m.safetensors").keys() == first.state_dict().keys()


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ([nn.Linear(8, 8).double()], None, r"Linear has no method save_pretrained.*run\.save\("),
        ([Tied(), Tied()], None, r"2 prepared models have save_pretrained\. Say which"),
        ([Tied()], Tied(), "was not given to run.prepare"),
    ],
)
def test_a_model_that_cannot_be_saved_so_is_refused_with_the_cure(
    tmp_path: Path, models: list[nn.Module], wanted: Any, message: str
) -> None:
    run = trained("single", *models)
    with pytest.raises(UsageError, match=message):
        run.save_pretrained(tmp_path / "new", wanted)
    assert list(tmp_path.iterdir()) == []


def fails_on_rank_zero(directory: Path) -> None:
    trained("ddp", Full()).save_pretrained(directory)


def test_a_failure_of_rank_zero_is_an_error_of_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"was not saved in .*: No space left"):
        world.run(2, fails_on_rank_zero, tmp_path / "new")
