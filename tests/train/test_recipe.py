"""Every part of a recipe does what it says in a real run, and changes nothing about the number
of ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import read
from shoal.testing import world
from shoal.train import entry

TINY = {
    "model.name": "residual_cnn",
    "model.options.widths": "[4, 8]",
    "model.options.groups": "2",
    "train.epochs": "2",
    "train.max_steps": "6",
    "train.batch_size": "50",
    "train.precision": "fp64",
    "log.every": "1",
    "log.tensorboard": "false",
}
RECIPES: dict[str, dict[str, str]] = {
    "plain": {},
    "adamw": {"optimizer.name": "AdamW", "optimizer.lr": "1e-3", "optimizer.nesterov": "false"},
    "no decay of norm and bias": {
        "optimizer.weight_decay": "0.1",
        "optimizer.decay_norm_and_bias": "false",
    },
    "step schedule": {
        "schedule.name": "step",
        "schedule.milestones": "[1]",
        "schedule.warmup_epochs": "0",
    },
    "linear scaling": {"optimizer.reference_batch": "25", "optimizer.lr": "0.05"},
    "mixup and cutmix": {"train.mixup": "0.2", "train.cutmix": "1.0"},
    "moving average": {"train.ema": "0.9"},
    "clipping": {"train.clip_norm": "0.1"},
    "accumulation": {"train.accumulate": "3"},
    "channels last": {"model.channels_last": "true"},
    "no last batch": {"train.drop_last": "true", "train.batch_size": "400", "train.max_steps": "6"},
    "workers": {"data.workers": "2"},
}
EVERY_DAY = ("mixup and cutmix", "accumulation")


def train(out: Path, recipe: dict[str, str]) -> None:
    entry.train(read("digits", [*(TINY | recipe | {"out": str(out)}).items()]).job)


def records(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith("_s")} for line in lines
    ]


def on(ranks: int, out: Path, recipe: dict[str, str]) -> list[dict[str, Any]]:
    world.run(ranks, train, out / str(ranks), recipe)
    return records(out / str(ranks))


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES]
)
def test_a_recipe_gives_the_same_records_on_one_rank_and_on_three(
    name: str, tmp_path: Path
) -> None:
    one, three = on(1, tmp_path, RECIPES[name]), on(3, tmp_path, RECIPES[name])
    assert len(one) == len(three)
    for expected, given in zip(one, three, strict=True):
        assert given.pop("kind") == expected.pop("kind")
        assert given == pytest.approx(expected, rel=1e-10)


def test_the_rate_follows_warm_up_and_milestones(tmp_path: Path) -> None:
    recipe = RECIPES["step schedule"] | {
        "train.batch_size": "500",
        "train.epochs": "3",
        "train.max_steps": "9",
    }
    rates = [record["lr"] for record in on(1, tmp_path, recipe) if record["kind"] == "train"]
    assert rates == pytest.approx([0.2] * 3 + [0.02] * 6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_trains(precision: str, tmp_path: Path) -> None:
    found = on(2, tmp_path, {"train.precision": precision, "train.max_steps": "3"})
    losses = [record["loss"] for record in found if record["kind"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"model.weights": "nowhere.pt"}, "there is no file nowhere.pt"),
        ({"train.batch_size": "2000", "train.drop_last": "true"}, "more than the data set holds"),
        ({"optimizer.options.dampning": "0.1"}, "did you mean 'dampening'"),
        ({"strategy": "dpp"}, "did you mean 'ddp'"),
        ({"model.name": "residual_cnm"}, "did you mean 'residual_cnn'"),
        ({"data.name": "digit"}, "did you mean 'digits'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    recipe: dict[str, str], message: str, tmp_path: Path
) -> None:
    import shoal

    with pytest.raises(shoal.ShoalError, match=message):
        train(tmp_path / "run", recipe)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_training_starts_from_given_weights(tmp_path: Path) -> None:
    import torch

    from shoal.models import build

    torch.manual_seed(5)
    model = build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "groups": 2})
    torch.save(model.state_dict(), tmp_path / "start.pt")
    plain = on(1, tmp_path / "a", {})
    given = on(1, tmp_path / "b", {"model.weights": str(tmp_path / "start.pt"), "seed": "0"})
    assert given[0]["loss"] != plain[0]["loss"]
