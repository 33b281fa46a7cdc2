"""What happens to a run whose checkpoints are damaged, or find no room on the disk."""

from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import EVERYTHING, assert_equal_to_the_bit, everything, tiny

from shoal.errors import LaunchError
from shoal.testing import world

# Checkpoints of the undisturbed run: steps 2, 3, 6, 9 and 10.
SETTINGS = {**EVERYTHING, "train.mixup": 0.0, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    world.run(2, tiny_jobs.trains, tiny(directory, SETTINGS))
    return everything(directory)


@pytest.mark.slow
def test_a_full_disk_is_said_and_training_goes_on(
    tmp_path: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    world.run(2, tiny_jobs.fills_the_disk, tiny(tmp_path / "run", SETTINGS), (3, 9))
    said = capsys.readouterr().err
    for step in (3, 9):
        assert (
            f"note: the checkpoint of step {step} was not saved in {tmp_path / 'run/checkpoints'}:"
            in said
        )
    assert said.count("File too large; training goes on") == 2
    names = [
        name
        for name in undisturbed["checkpoints"]
        if name not in ("step-00000003", "step-00000009")
    ]
    assert_equal_to_the_bit(everything(tmp_path / "run"), {**undisturbed, "checkpoints": names})


@pytest.mark.slow
def test_what_is_called_the_best_was_saved(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    assert undisturbed["info"]["best"]["step"] == 12
    with pytest.raises(LaunchError, match="the checkpoint of step 12 was not saved"):
        world.run(2, tiny_jobs.fills_the_disk, tiny(tmp_path / "run", SETTINGS), (12,))
    found = everything(tmp_path / "run")
    assert found["best"] != "step-00000012\n"
    assert found["best"].strip() in found["checkpoints"]
