"""Ctrl-C ends a training with one line: from which step the same command goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = (
    *("--model.name", "mlp", "--model.options.hidden", "[8]"),
    *("--train.epochs", "100000", "--log.tensorboard", "false"),
)


@pytest.mark.parametrize(
    ("words", "epoch", "saved"),
    [
        (
            ("-n", "2", "--train.batch_size", "500"),
            3,
            r"; the newest save is of step \d+, and the same command resumes there",
        ),
        pytest.param(
            ("--train.batch_size", "5"),
            1,
            ", before the first save; the same command begins again",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two ranks", "alone"],
)
def test_an_interrupted_training_says_what_it_has_saved(
    tmp_path: Path, words: tuple[str, ...], epoch: int, saved: str
) -> None:
    command = [sys.executable, "-m", "shoal", "train", "digits", "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [*command, *TINY, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The shell of a background job may have made ranks deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        next(line for line in training.stdout if line.startswith(f"epoch {epoch}/"))
        training.send_signal(signal.SIGINT)
        training.stdout.read()
        said = training.stderr.read()
    assert training.returncode == 130
    found = re.fullmatch(r"note: interrupted after step (\d+)" + saved + "\n", said)
    assert found, said
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert int(found[1]) >= last["step"] > 0
    assert not (tmp_path / "run/.stopped").exists()
