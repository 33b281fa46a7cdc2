"""What an earlier version has saved, this one goes on with, to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import circumstances, files, saved
from .circumstances import DOUBLE
from .commands import shoal
from .test_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
RECORD = files.read("saved")
ENDED = files.read_tensors("saved")
EVERY_DAY = [*((name, run.strategy, run.ranks) for name, run in saved.SAVED.items())]
EVERY_DAY += [("zero3", "ddp", 3)]
RESUMED = [
    pytest.param(*row, id=saved.key(*row), marks=[] if row in EVERY_DAY else [pytest.mark.slow])
    for row in saved.RESUMED
]


def test_every_archive_is_gone_on_with() -> None:
    keys = {saved.key(*row) for row in saved.RESUMED}
    assert RECORD["resumed"].keys() == ENDED.keys() == keys


@pytest.mark.parametrize(("name", "strategy", "ranks"), RESUMED)
def test_a_run_that_was_saved_goes_on_to_the_recorded_numbers(
    tmp_path: Path, name: str, strategy: str, ranks: int
) -> None:
    key = saved.key(name, strategy, ranks)
    directory = saved.unpack(name, tmp_path / "run")
    found, recorded = saved.go_on(directory, strategy, ranks), RECORD["resumed"][key]
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [2, saved.HALF, 6, saved.ALL, saved.ALL]
    keys = saved.keys(saved.last_checkpoint(directory))
    assert set(recorded["keys"]["manifest"]) <= set(keys["manifest"])
    assert recorded["keys"]["tensors"].items() <= keys["tensors"].items()
    compared = {tensor: found[tensor] for tensor in recorded["keys"]["tensors"]}
    if circumstances.same_bits(RECORD["circumstances"]):
        assert circumstances.digest(compared) == recorded["bits"]
    assert_close(saved.compared_by_value(compared), ENDED[key], DOUBLE)


@pytest.mark.parametrize("name", saved.SAVED)
def test_a_saved_run_is_evaluated_and_exported_as_before(tmp_path: Path, name: str) -> None:
    directory = saved.unpack(name, tmp_path / "run")
    found = saved.evaluated(directory)
    recorded = RECORD["evaluated"][name]
    assert {key: found[key] for key in recorded} == pytest.approx(recorded, rel=DOUBLE)
    # Nothing is computed here: these are the bytes of the checkpoint.
    model = saved.exported(directory, tmp_path / "model.safetensors")
    assert circumstances.digest(model) == RECORD["exported"][name]


def test_the_pushes_of_a_recorded_run_are_done_again(tmp_path: Path) -> None:
    ended = shoal("replay", saved.unpack(saved.RECORDED, tmp_path / "run"), "--json")
    found = json.loads(ended.out)
    assert (found["first"], found["last"], found["workers"]) == (0, saved.ALL, 2)
    if circumstances.same_bits(RECORD["circumstances"]):
        assert (ended.code, found["differing"]) == (0, [])
    assert all(difference < DOUBLE for _, difference in found["differing"])
