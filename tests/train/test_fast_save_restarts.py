"""`shoal train -n 2` with a fast directory: a killed rank costs the steps since the last save
there, at most, and the end has the bits of a run that was left alone.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from restarted_runs import SERVERS, Undisturbed, command, foretell, undisturbed_runs
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal.config.job import Job

pytestmark = pytest.mark.slow

MORTAL = {
    **MLP,
    "plugin": str(Path(__file__).with_name("crashing_data.py")),
    "data.name": "mortal",
    "model.options.hidden": [6, 6],
    "train.ema": 0.9,
    "checkpoint.every_epochs": 3,
    "checkpoint.every_steps": None,
    "checkpoint.fast_every_steps": 1,
}
LOCAL = "local=3"
PIPELINE = "pipeline=2,cuts=layers.3"  # else the cuts are chosen at each start, by measured costs
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_runs(tmp_path_factory, mortal)


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
    foretell(tmp_path, rank, part=part, point=draw.randrange(early, late))
    code = command(mortal(tmp_path, strategy), tmp_path)
    said = capfd.readouterr().err
    assert code == 0, said
    assert f"rank {rank} of 2 was killed by SIGKILL" in said
    assert "resumed from" in said
    assert "Traceback" not in said
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
    assert list((tmp_path / "fast").iterdir()) == []
