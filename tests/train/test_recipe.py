"""Every part of a recipe does what it says in a real run, and changes nothing about the number
of ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import read
from shoal.errors import ShoalError
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


def train(out: Path, recipe: dict[str, str]) -> None:
    entry.train(read("digits", [*(TINY | recipe | {"out": str(out)}).items()]).job)


def records(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith("_s")} for line in lines
    ]


def on(ranks: int, out: Path, recipe: dict[str, str]) -> list[dict[str, Any]]:
    if ranks == 1:
        train(out / "1", recipe)
    else:
        world.run(ranks, train, out / str(ranks), recipe)
    return records(out / str(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_same_records_on_one_rank_and_on_three(
    name: str, tmp_path: Path
) -> None:
    one, three = on(1, tmp_path, RECIPES[name]), on(3, tmp_path, RECIPES[name])
    assert len(one) == len(three)
    for expected, given in zip(one, three, strict=True):
        assert given.pop("kind") == expected.pop("kind")
        assert given == pytest.approx(expected, rel=1e-10)


def test_batches_larger_than_the_data_set_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ShoalError, match="more than the data set holds"):
        train(tmp_path / "run", {"train.batch_size": "2000", "train.drop_last": "true"})
    assert not (tmp_path / "run" / "checkpoints").exists()
