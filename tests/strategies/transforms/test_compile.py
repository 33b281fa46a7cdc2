"""torch.compile under every strategy. Slow: the first batch waits for a C++ compiler."""

import json
from pathlib import Path

import pytest

from shoal.config import read
from shoal.testing import world
from shoal.train import entry


def train(out: Path, strategy: str, compiled: str) -> None:
    flags = {
        "model.name": "mlp",
        "train.max_steps": "5",
        "log.every": "1",
        "train.precision": "fp64",
    }
    flags |= {
        "model.compile": compiled,
        "strategy": strategy,
        "out": str(out),
        "log.tensorboard": "false",
    }
    entry.train(read("digits", [*flags.items()]).job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero2", "zero3,unit=Linear", "recompute,unit=Linear,zero3"]
)
def test_a_compiled_model_trains_as_a_plain_one(tmp_path: Path, strategy: str) -> None:
    losses = []
    for compiled in ("false", "true"):
        world.run(2, train, tmp_path / compiled, strategy, compiled, timeout_s=400)
        lines = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
