"""`shoal train -n 2` goes on by itself when a process is killed, and ends at the bits of a run
that was left alone.
"""

import json
import random
import signal
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

MORTAL = {
    **MLP,
    "import": str(Path(__file__).with_name("crashing_data.py")),
    "data.name": "mortal",
    "train.ema": 0.9,
    "checkpoint.every_epochs": 2,
}
SERVERS = "server=2,part_mb=0.0001,lease_s=0.5"
# From the seed follow the rank and the call at which it is killed.
POINTS = [("ddp", "saving", 3), (SERVERS, "training", 4)]
MORE = [
    ("ddp", "training", 1),
    ("ddp", "training", 2),
    (SERVERS, "training", 5),
    (SERVERS, "saving", 6),
]
MARKED = [*POINTS, *(pytest.param(*point, marks=pytest.mark.slow) for point in MORE)]

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
    return tiny(folder / "run", MORTAL, strategy=strategy, data__path=str(folder))


def command(job: Job, folder: Path, *words: str) -> int:
    """The exit code of `shoal train JOB -n 2`."""
    (folder / "job.yaml").write_text(to_yaml(job))
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", str(folder / "job.yaml"), "-n", "2", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def foretell(folder: Path, rank: int, **fate: object) -> None:
    (folder / f"fate.{rank}").write_text(json.dumps(fate))


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


@pytest.mark.parametrize("replicas", ["", ",replicas=2"])
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
