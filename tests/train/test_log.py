"""metrics.jsonl and TensorBoard events on real files, killed and full disks included."""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shoal.loggers.metrics_file import read_metrics
from shoal.train.console import Log


def record(step: int) -> dict[str, float | int]:
    return {
        "step": step,
        "epoch": 1 + (step - 1) // 4,
        "sample": 8 * step,
        "loss": 1 / step,
        "lr": 0.1,
        "time_s": 0.5,
    }


def write(log: Log, steps: range) -> None:
    """A run of epochs of 4 steps that logs each step and evaluates after each epoch."""
    for step in steps:
        log.write("train", record(step))
        if step % 4 == 0:
            log.write(
                "validation",
                {
                    "step": step,
                    "epoch": step // 4,
                    "loss": 2 / step,
                    "top1": 10.0 * step,
                    "time_s": 0.5,
                },
            )


def run(directory: Path, steps: range, tensorboard: bool = False) -> None:
    log = Log(directory, active=True, tensorboard=tensorboard, resume_step=steps.start - 1)
    write(log, steps)
    log.close()


def lines(directory: Path) -> list[bytes]:
    return (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)


@contextmanager
def largest_file(size_bytes: int):
    """Files cannot grow beyond this size, as on a disk that is full: a write is cut short or
    fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_number_that_is_not_finite_is_null_so_that_every_line_is_json(tmp_path):
    log = Log(tmp_path, active=True, tensorboard=True, resume_step=0)
    log.write("train", {"step": 1, "loss": float("nan"), "perplexity": float("inf")})
    log.close()
    assert lines(tmp_path) == [b'{"kind": "train", "step": 1, "loss": null, "perplexity": null}\n']


@pytest.mark.parametrize("killed_at", [4, 7, 11])
def test_a_resumed_run_ends_up_with_the_file_of_an_undisturbed_one(tmp_path, killed_at):
    run(tmp_path / "undisturbed", range(1, 13))
    run(tmp_path / "resumed", range(1, killed_at + 1))
    run(tmp_path / "resumed", range(4, 13))
    assert lines(tmp_path / "resumed") == lines(tmp_path / "undisturbed")


def test_a_line_that_was_torn_anywhere_is_dropped_on_resume(tmp_path):
    run(tmp_path, range(1, 9))
    whole = b"".join(lines(tmp_path))
    resumed_from = whole.index(b'{"kind": "train", "step": 5')
    for end in range(resumed_from, len(whole), 7):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:end])
        run(tmp_path, range(5, 9))
        assert b"".join(lines(tmp_path)) == whole


def test_a_last_line_that_lost_its_newline_only_is_kept(tmp_path):
    run(tmp_path, range(1, 4))
    whole = b"".join(lines(tmp_path))
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])
    run(tmp_path, range(4, 4))
    assert b"".join(lines(tmp_path)) == whole


def test_an_evaluation_that_is_repeated_after_a_resume_is_written_once(tmp_path):
    run(tmp_path, range(1, 5))
    before = lines(tmp_path)
    log = Log(tmp_path, active=True, tensorboard=False, resume_step=4)
    log.write("validation", {"step": 4, "epoch": 1, "loss": 0.5, "top1": 40.0, "time_s": 9.9})
    log.close()
    assert lines(tmp_path) == before


def test_a_run_that_starts_anew_forgets_one_that_never_saved(tmp_path):
    run(tmp_path, range(1, 4))
    run(tmp_path, range(1, 2))
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1]


def test_what_was_written_survives_a_kill(tmp_path):
    program = """
import os, pathlib, signal, sys
from shoal.train.console import Log
log = Log(pathlib.Path(sys.argv[1]), active=True, tensorboard=True, resume_step=0)
log.write("train", {"step": 1, "loss": 0.5})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert lines(tmp_path) == [b'{"kind": "train", "step": 1, "loss": 0.5}\n']
    assert [event.value for event in scalars(tmp_path, "train/loss")] == [0.5]


def test_a_full_disk_costs_whole_lines_and_is_said_once(tmp_path, capfd):
    log = Log(tmp_path, active=True, tensorboard=True, resume_step=0)
    with largest_file(350):
        write(log, range(1, 9))
    log.write("train", record(9))  # there is room again
    log.close()
    records, unreadable = read_metrics(tmp_path / "metrics.jsonl")
    assert unreadable == 0
    assert [r["step"] for r in records] == [1, 2, 3, 9]
    assert [event.step for event in scalars(tmp_path, "train/loss")][-1] == 9
    assert capfd.readouterr().err.count("training goes on") == 1


def test_other_ranks_write_and_say_nothing(tmp_path, capfd):
    log = Log(tmp_path / "run", active=False, tensorboard=True, resume_step=0)
    log.header(["global batch 8 = 2 ranks x 4"])
    log.note("something")
    write(log, range(1, 5))
    log.close({"epochs": 1})
    assert not (tmp_path / "run").exists()
    assert capfd.readouterr() == ("", "")


def test_the_header_goes_to_stdout_and_notes_to_stderr(tmp_path, capfd):
    log = Log(tmp_path, active=True, tensorboard=False, resume_step=0)
    log.header(["global batch 8 = 2 ranks x 4", "ddp over gloo"])
    log.note("checkpoint step-4 is corrupt, step-2 is used")
    log.close()
    out, err = capfd.readouterr()
    assert out == "global batch 8 = 2 ranks x 4\nddp over gloo\n"
    assert err == "note: checkpoint step-4 is corrupt, step-2 is used\n"


def test_the_closing_table_shows_what_was_reached(tmp_path, capfd):
    log = Log(tmp_path, active=True, tensorboard=False, resume_step=0)
    best = {"step": 300, "epoch": 13, "loss": 0.0712, "top1": 98.056, "top5": 100.0, "samples": 360}
    log.close(
        {"final": best | {"step": 345, "top1": 97.5}, "best": best, "epochs": 15, "steps": 12_345}
        | {
            "time_s": 3725.4,
            "samples_per_s": 812.3,
            "checkpoint": Path("runs/digits/step-345"),
            "curves": None,
        }
    )
    assert capfd.readouterr().out.splitlines() == [
        "final validation  loss 0.0712  top1 97.50 %  top5 100.00 %  (step 345)",
        "best validation   loss 0.0712  top1 98.06 %  top5 100.00 %  (step 300, by top1)",
        "epochs            15",
        "steps             12,345",
        "time              1:02:05",
        "samples/s         812",
        "checkpoint        runs/digits/step-345",
    ]


def scalars(directory: Path, tag: str) -> list:
    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return accumulator.Scalars(tag)


def test_tensorboard_shows_the_scalars_of_training_and_validation(tmp_path):
    run(tmp_path, range(1, 9), tensorboard=True)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    tags = {"train/loss", "train/lr", "validation/loss", "validation/top1"}
    assert set(accumulator.Tags()["scalars"]) == tags
    assert [(e.step, e.value) for e in accumulator.Scalars("validation/top1")] == [
        (4, 40.0),
        (8, 80.0),
    ]


def test_tensorboard_forgets_what_a_killed_run_wrote_after_its_checkpoint(tmp_path):
    run(tmp_path, range(1, 8), tensorboard=True)
    run(tmp_path, range(4, 10), tensorboard=True)
    assert [event.step for event in scalars(tmp_path, "train/loss")] == list(range(1, 10))


def test_tensorboard_is_imported_only_where_it_is_wanted(tmp_path):
    program = """
import pathlib, sys
from shoal.train.console import Log
Log(pathlib.Path(sys.argv[1]), active=True, tensorboard=False, resume_step=0).close()
Log(pathlib.Path(sys.argv[1]), active=False, tensorboard=True, resume_step=0).close()
print([name for name in ("tensorboard", "torch", "rich", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
