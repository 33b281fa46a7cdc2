"""`shoal train -n 2` goes on by itself when a process is killed, and ends at the bits of a run
that was left alone.
"""

import random
import signal
from pathlib import Path

import pytest
from restarted_runs import SERVERS, Undisturbed, command, foretell, undisturbed_runs
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal.config.job import Job

MORTAL = {
    **MLP,
    "plugin": str(Path(__file__).with_name("crashing_data.py")),
    "data.name": "mortal",
    "train.ema": 0.9,
    "checkpoint.every_epochs": 2,
}
# From the seed follow the rank and the call at which it is killed.
POINTS = [("ddp", "saving", 3)]
MORE = [
    (SERVERS, "training", 4),
    ("ddp", "training", 1),
    ("ddp", "training", 2),
    (SERVERS, "training", 5),
    (SERVERS, "saving", 6),
]
MARKED = [*POINTS, *(pytest.param(*point, marks=pytest.mark.slow) for point in MORE)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_runs(tmp_path_factory, mortal)


def mortal(folder: Path, strategy: str) -> Job:
    return tiny(folder / "run", MORTAL, strategy=strategy, data__path=str(folder))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers keep their keys."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("SHOAL_SERVER_DIRECTORY", str(directory))
    return directory


@pytest.mark.parametrize(("strategy", "part", "seed"), MARKED)
def test_a_run_that_loses_a_worker_ends_bit_equal(
    undisturbed: Undisturbed,
    tmp_path: Path,
    temporary: Path,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    part: str,
    seed: int,
) -> None:
    expected, calls = undisturbed(strategy)
    draw = random.Random(seed)
    rank = draw.randrange(2)
    foretell(tmp_path, rank, part=part, point=draw.randrange(1, calls[rank][part] * 9 // 10))
    assert command(mortal(tmp_path, strategy), tmp_path) == 0
    said = capfd.readouterr().err
    assert (
        f"note: rank {rank} of 2 was killed by SIGKILL (out of memory?); 2 processes start from"
        in said
    )
    assert "Traceback" not in said
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "run/.control").exists()


@pytest.mark.parametrize("replicas", ["", pytest.param(",replicas=2", marks=pytest.mark.slow)])
def test_a_run_that_loses_all_servers_of_a_shard_ends_bit_equal(
    undisturbed: Undisturbed,
    tmp_path: Path,
    temporary: Path,
    capfd: pytest.CaptureFixture[str],
    replicas: str,
) -> None:
    expected, _ = undisturbed(SERVERS)
    foretell(tmp_path, 0, shard=1, sample=random.Random(replicas).randrange(18, 40))
    assert command(mortal(tmp_path, SERVERS + replicas), tmp_path) == 0
    said = capfd.readouterr().err
    assert (
        "note: shard 1 of the parameter servers is lost: its servers are gone, and nobody holds "
        "what they held; " in said
    )
    assert "2 processes start from the checkpoint of step " in said
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
    assert list(temporary.iterdir()) == []


def test_a_rank_lost_before_the_first_checkpoint_starts_the_run_again(
    undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foretell(tmp_path, 1, part="training", point=1)
    assert command(mortal(tmp_path, "ddp"), tmp_path, "--checkpoint.resume", "false") == 0
    assert "from the beginning, for there is no checkpoint" in capfd.readouterr().err
    assert_equal_to_the_bit(everything(tmp_path / "run"), undisturbed("ddp")[0])


def test_without_restarts_the_same_command_again_goes_on(
    undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, calls = undisturbed("ddp")
    foretell(tmp_path, 1, part="training", point=calls[1]["training"] // 2)
    job = mortal(tmp_path, "ddp")
    assert command(job, tmp_path, "--restarts", "0") == 128 + signal.SIGKILL
    assert "processes start" not in capfd.readouterr().err
    assert command(job, tmp_path, "--restarts", "0") == 0
    assert_equal_to_the_bit(everything(tmp_path / "run"), undisturbed("ddp")[0])
