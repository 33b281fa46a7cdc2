"""`shoal train -n 2` with a fast directory: a killed rank costs the steps since the last save
there, at most, and the end has the bits of a run that was left alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal import cli
from shoal.config import to_yaml
from shoal.config.job import Job
from shoal.testing import world

pytestmark = pytest.mark.slow

MORTAL = {
    **MLP,
    "import": str(Path(__file__).with_name("crashing_data.py")),
    "data.name": "mortal",
    "model.options.hidden": [6, 6],
    "train.ema": 0.9,
    "checkpoint.every_epochs": 3,
    "checkpoint.every_steps": None,
    "checkpoint.fast_every_steps": 1,
}
LOCAL = "local=3"
PIPELINE = "pipeline=2,cuts=layers.3"  # else the cuts are chosen at each start, by measured costs
SERVERS = "server=2,part_mb=0.0001,lease_s=0.5"
# From the seed follow the rank and the call at which it is killed; "saving" is mostly there.
POINTS = [
    (strategy, part, seed)
    for strategy in ("ddp", "zero3")
    for part in ("training", "saving")
    for seed in (1, 2)
] + [
    (strategy, part, 3)
    for strategy in ("zero1", "tensor=2", PIPELINE, LOCAL, SERVERS)
    for part in ("training", "saving")
]

Undisturbed = Callable[[str], tuple[dict[str, Any], list[dict[str, int]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What a run that is left alone leaves, and how many calls each of its ranks makes in each
    part.
    """
    known: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {}

    def of(strategy: str) -> tuple[dict[str, Any], list[dict[str, int]]]:
        if strategy not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            calls = world.run(2, tiny_jobs.counts_calls, mortal(folder, strategy))
            known[strategy] = everything(folder / "run"), calls
        return known[strategy]

    return of


def mortal(folder: Path, strategy: str) -> Job:
    return tiny(
        folder / "run",
        MORTAL,
        strategy=strategy,
        data__path=str(folder),
        checkpoint__fast_dir=str(folder / "fast"),
    )


@pytest.mark.parametrize(("strategy", "part", "seed"), POINTS)
def test_a_killed_rank_costs_no_more_than_the_steps_since_the_last_fast_save(
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    part: str,
    seed: int,
) -> None:
    expected, calls = undisturbed(strategy)
    keys = tmp_path / "keys"
    keys.mkdir()
    monkeypatch.setenv("SHOAL_SERVER_DIRECTORY", str(keys))
    draw = random.Random(seed)
    rank = draw.randrange(2)
    most = calls[rank][part]
    # Calls that wait for servers are more or fewer each time, so a late one might never come.
    early, late = (most // 4, most // 2) if strategy == SERVERS else (most // 2, most * 9 // 10)
    fate = {"part": part, "point": draw.randrange(early, late)}
    (tmp_path / f"fate.{rank}").write_text(json.dumps(fate))
    job = mortal(tmp_path, strategy)
    (tmp_path / "job.yaml").write_text(to_yaml(job))
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", str(tmp_path / "job.yaml"), "-n", "2"])
    said = capfd.readouterr().err
    assert stop.value.code == 0, said
    assert f"rank {rank} of 2 was killed by SIGKILL" in said
    assert "resumed from" in said
    assert "Traceback" not in said
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
    assert list((tmp_path / "fast").iterdir()) == []
