"""Which tasks are trained, and by which strategies: the flags of `shoal train`."""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """An experiment. Args: title: on the page. argv: what is trained."""

    title: str
    argv: tuple[str, ...]


class Case(NamedTuple):
    """A way to train it. Args: argv: beside the task's. tasks: for which of them."""

    strategy: str
    argv: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("digits", "lstm")


WORKERS = 4
YARDSTICK = "ddp"
TASKS = {
    "digits": Task(
        "digits: residual CNN, 12 epochs, SGD with momentum", ("digits", "--train.epochs", "12")
    ),
    # Bounded staleness knows no step that all workers share, so nothing can be clipped: here nobody
    # clips.
    "lstm": Task(
        "stdlib_lstm, shortened: width 256, 64 bytes a sample, 200 steps, AdamW",
        (
            *("stdlib_lstm", "--train.max_steps", "200", "--data.sequence_length", "64"),
            *("--model.options.width", "256", "--schedule.warmup_epochs", "0.0015"),
            *("--train.clip_norm", "null"),
        ),
    ),
}
# Adam divides by the size of one worker's gradients, which are noisier than the mean of all: steps
# are shorter by up to the square root of the workers.
LONGER = ("--optimizer.lr", "8e-3")
CASES = {
    YARDSTICK: Case("ddp"),
    "server=2": Case("server=2"),
    "server=2,staleness=3": Case("server=2,staleness=3"),
    "server=2,staleness=async": Case("server=2,staleness=async"),
    f"{YARDSTICK}, twice the learning rate": Case("ddp", LONGER, ("lstm",)),
    "server=2,staleness=3, twice the learning rate": Case(
        "server=2,staleness=3", LONGER, ("lstm",)
    ),
}
