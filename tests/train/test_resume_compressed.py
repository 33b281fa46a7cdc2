"""What is kept from step to step for fewer bytes goes on after a resume, and its loss is said
where it is lost.
"""

import signal
from pathlib import Path

import pytest
import tiny_jobs
from tiny_jobs import CNN, GPT, assert_equal_to_the_bit, everything, tiny

from shoal.checkpoint import newest
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

STRATEGIES = [
    ("ddp,compress=topk=0.1,bucket_mb=0.001", CNN, 6),
    ("ddp,compress=onebit", GPT, 6),
    ("ddp,compress=powersgd=1", CNN, 6),
    ("local=4", GPT, 8),  # regular meetings come after steps 4, 8 and 12
    ("diloco=4", CNN, 8),
]
EVERY_DAY = ("ddp,compress=onebit",)
MARKED = [
    pytest.param(*row, marks=[] if row[0] in EVERY_DAY else [pytest.mark.slow])
    for row in STRATEGIES
]


@pytest.mark.parametrize(("strategy", "job", "stops"), MARKED, ids=[row[0] for row in STRATEGIES])
def test_a_stopped_run_ends_bit_equal_at_the_same_number_of_ranks(
    tmp_path: Path, strategy: str, job: dict, stops: int
) -> None:
    # Batches of GPT are drawn with dropout, and evaluations and saves every third step come between
    # meetings. CNN leaves out the smaller batch of an epoch, which has three steps then.
    more = {"train.epochs": 4} if job is CNN else {}
    world.run(3, tiny_jobs.trains, tiny(tmp_path / "whole", job, more, strategy=strategy))
    interrupted = tiny(tmp_path / "run", job, more, strategy=strategy)
    with world.start(3, tiny_jobs.is_signalled, interrupted, 5, signal.SIGTERM, 1) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 3
    saved = newest(tmp_path / "run/checkpoints")
    assert saved is not None
    assert saved.name == f"step-{stops:08d}"
    world.run(3, tiny_jobs.trains, interrupted)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        pytest.param("ddp,compress=onebit", "begin at zero", marks=pytest.mark.slow),
        pytest.param("server=1,compress=onebit", "begin at zero", marks=pytest.mark.slow),
        ("diloco=4", "all ranks go on from the first one's"),
    ],
)
def test_on_another_number_of_ranks_it_goes_on_and_says_what_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: str, words: str
) -> None:
    job = tiny(tmp_path / "run", GPT, strategy=strategy)
    with world.start(2, tiny_jobs.is_signalled, job, 5) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    capfd.readouterr()
    assert world.run(3, tiny_jobs.trains, job) == [12, 12, 12]
    assert words in capfd.readouterr().err


OTHERS = [
    pytest.param("diloco=4", "ddp", marks=pytest.mark.slow),
    pytest.param("ddp", "local=4", marks=pytest.mark.slow),
    pytest.param("server=1,compress=topk=0.1", "ddp,compress=topk=0.1", marks=pytest.mark.slow),
    ("ddp,compress=topk=0.1", "server=1,compress=topk=0.1"),
]


@pytest.mark.parametrize(("before", "after"), OTHERS)
def test_a_run_goes_on_under_another_strategy(tmp_path: Path, before: str, after: str) -> None:
    with world.start(
        2, tiny_jobs.is_signalled, tiny(tmp_path / "run", GPT, strategy=before), 5
    ) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    assert world.run(2, tiny_jobs.trains, tiny(tmp_path / "run", GPT, strategy=after)) == [12, 12]
