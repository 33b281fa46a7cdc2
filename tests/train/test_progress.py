"""The display of a run: plain lines in a file, a bar on a real (pseudo) terminal, and the
arithmetic behind them.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from functools import cache

import pytest

from shoal.train.console import Progress, duration, number

RUN = """
import sys
from shoal.train.console import print_summary
from shoal.train.console import Progress

progress = Progress(active=True, epochs=2, total_steps=20)
for epoch in (1, 2):
    progress.epoch(epoch, steps=10)
    for step in range(1, 11):
        progress.step()
        progress.show({"step": step, "epoch": epoch, "loss": 0.25, "top1": 97.5, "lr": 0.1})
    print("a word in between", file=sys.stderr)
    with progress.paused("evaluating"):
        pass
    results = {"loss": 0.2, "top1": 98.0, "top5": 99.5, "samples": 360}
    progress.evaluation({"step": 10 * epoch, "epoch": epoch, **results})
progress.close()
progress.close()
best = {"step": 20, "loss": 0.2, "top1": 98.0}
print_summary({"best": best, "steps": 20, "curves": "runs/digits/curves.png"})
"""


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@cache
def on_a_terminal(columns: int, **environment: str) -> str:
    """What RUN writes on a terminal of that width, escape sequences included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    surroundings |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment
    with subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=theirs, stderr=theirs, env=surroundings
    ) as process:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # what Linux says when the other side is closed
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def plain(text: str) -> list[str]:
    """The lines that were ever drawn, without escape sequences."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


def test_in_a_file_a_run_is_plain_lines(tmp_path):
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "epoch 1/2  step 1/20  loss 0.2500  top1 97.50 %"
    assert lines[1:3] == [
        "epoch 1/2  step 10/20  validation  loss 0.2000  top1 98.00 %  top5 99.50 %",
        "epoch 2/2  step 20/20  validation  loss 0.2000  top1 98.00 %  top5 99.50 %",
    ]
    assert lines[-1] == "curves           runs/digits/curves.png"
    assert "\x1b" not in done.stdout
    assert done.stderr == "a word in between\n" * 2


@pytest.mark.parametrize("columns", [30, 60, 100])
def test_on_a_terminal_a_run_is_a_bar_that_fits(columns):
    drawn = on_a_terminal(columns)
    bars = [line for line in plain(drawn) if re.match(r"epoch \d/2 ", line) and "step" not in line]
    assert bars
    assert max(map(len, bars)) <= columns
    assert any("loss 0.2500" in bar for bar in bars)
    assert any("━" in bar for bar in bars) or columns < 40
    assert any("top1 97.50 %" in bar for bar in bars) or columns < 100


def test_on_a_terminal_results_and_words_in_between_stay(tmp_path):
    lines = [line.rstrip() for line in plain(on_a_terminal(100))]
    assert "epoch 2/2  step 20/20  validation  loss 0.2000  top1 98.00 %  top5 99.50 %" in lines
    assert lines.count("a word in between") == 2
    assert "best validation  loss 0.2000  top1 98.00 %  (step 20, by top1)" in lines


def test_the_cursor_is_never_left_hidden():
    drawn = on_a_terminal(100)
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l")
    # Also while the bar is up, for a run that is killed: it is shown again before the first bar is
    # drawn.
    assert drawn.index("\x1b[?25h") < drawn.index("epoch 1/2")


def test_no_color_means_no_color():
    colors = re.compile(r"\x1b\[[0-9;]*[34]8?;?[0-9;]*m")
    assert colors.search(on_a_terminal(100))
    assert not colors.search(on_a_terminal(100, NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines():
    assert "\x1b" not in on_a_terminal(80, TERM="dumb")


def test_other_ranks_show_nothing(capfd):
    progress = Progress(active=False, epochs=1, total_steps=2)
    progress.epoch(1, 2)
    progress.step()
    progress.show({"loss": 1.0})
    with progress.paused("evaluating"):
        progress.evaluation({"loss": 1.0})
    progress.close()
    assert capfd.readouterr() == ("", "")


def test_a_reader_that_went_away_does_not_end_training(tmp_path):
    program = RUN + "\nopen(sys.argv[1], 'w').write('done')"
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "end"],
        stdout=writer,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    os.close(writer)
    assert (tmp_path / "end").read_text() == "done"


def test_the_end_follows_from_the_time_of_steps_and_pauses():
    clock = Clock()
    progress = Progress(active=True, epochs=1, total_steps=101, clock=clock)
    clock.now += 60  # the first step compiles, and is not counted
    progress.step()
    assert progress.remaining_s is None
    for _ in range(10):
        clock.now += 0.5
        progress.step()
    assert progress.remaining_s == pytest.approx(90 * 0.5)
    with progress.paused("evaluating"):
        clock.now += 5
    assert progress.remaining_s == pytest.approx(90 * 1.0)


def test_a_line_has_the_speed_of_its_record(capsys):
    clock = Clock()
    progress = Progress(active=True, epochs=1, total_steps=10, clock=clock)
    for _ in range(2):
        clock.now += 2
        progress.step()
    progress.show({"loss": 0.25, "samples_per_s": 128.0})
    said = capsys.readouterr().out
    assert said == "epoch 1/1  step 2/10  loss 0.2500  128 samples/s  ETA 0:16\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (754, "12:34"),
        (11_045, "3:04:05"),
        (90_000, "1 d 1:00:00"),
        (-3, "0:00"),
    ],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top1", 97.5, "97.50 %"),
        ("loss", 0.12345, "0.1235"),
        ("loss", float("nan"), "nan"),
        ("perplexity", 3.14159, "3.142"),
        ("samples_per_s", 12345.6, "12,346"),
        ("samples_per_s", 3.456, "3.46"),
        ("steps", 100_000, "100,000"),
    ],
)
def test_numbers_are_written_as_people_read_them(name, value, text):
    assert number(name, value) == text
