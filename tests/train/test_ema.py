from pathlib import Path

import pytest
import tiny_jobs
import torch
from tiny_jobs import GPT, metrics, tiny
from torch import nn

from shoal.testing import world
from shoal.train.ema import Ema


def linear(value: float) -> nn.Linear:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, 0.0)
    return model


def test_the_average_follows_its_formula_with_a_shorter_memory_at_first() -> None:
    model, expected = linear(1.0), 1.0
    ema = Ema(dict(model.named_parameters()), decay=0.5)
    for step, weight in enumerate([2.0, 3.0, 5.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0], start=1):
        nn.init.constant_(model.weight, weight)
        ema.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert ema.state()["ema.weight"].item() == pytest.approx(expected, rel=1e-6)


def test_weights_come_back_after_an_evaluation_even_if_it_fails() -> None:
    model = linear(1.0)
    ema = Ema(dict(model.named_parameters()), decay=0.5)
    nn.init.constant_(model.weight, 9.0)

    def fail() -> None:
        with ema.in_place():
            assert model.weight.item() == 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.weight.item() == 9.0


def test_state_given_back_continues_the_average() -> None:
    one, other = linear(1.0), linear(1.0)
    first, second = Ema(dict(one.named_parameters()), 0.9), Ema(dict(other.named_parameters()), 0.9)
    nn.init.constant_(one.weight, 3.0)
    first.update()
    second.load({name: value.clone() for name, value in first.state().items()})
    nn.init.constant_(other.weight, 3.0)
    first.update()
    second.update()
    assert torch.equal(first.state()["ema.weight"], second.state()["ema.weight"])


@pytest.mark.slow
def test_an_average_is_divided_with_the_model_that_waits_for_its_first_batch(
    tmp_path: Path,
) -> None:
    settings = {**GPT, "model.options.dropout": 0.0, "train.precision": "fp64", "train.epochs": 1}
    tiny_jobs.trains(tiny(tmp_path / "one", settings))
    job = tiny(tmp_path / "cut", settings, strategy="tensor=2,pipeline=2")
    world.run(4, tiny_jobs.trains, job)
    one, cut = (
        [line["loss"] for line in metrics(tmp_path / name) if line["kind"] == "validation"]
        for name in ("one", "cut")
    )
    assert cut == pytest.approx(one, rel=1e-10)
