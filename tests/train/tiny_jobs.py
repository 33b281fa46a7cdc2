"""Jobs of a dozen steps, what ranks do with them, and how two runs are compared to the last bit."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints, newest, read_info, tensor_files
from shoal.comm.norm import full_tensor
from shoal.config import read
from shoal.config.job import Job
from shoal.shm_backend.waiter import Waiter
from shoal.train.loop import Training
from shoal.train.run_directory import claim_for_all

DATA = Path(__file__).with_name("tiny_data.py")
TIMES = ("time_s", "samples_per_s")

# 30 samples in batches of 8: three full ones and one of 6.
COMMON = {
    "plugin": str(DATA),
    "data.samples": 30,
    "train.epochs": 3,
    "train.batch_size": 8,
    "evaluation.batch_size": 8,
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 2,
    "checkpoint.last_save_wait_s": 0,
    "log.every": 2,
    "log.tensorboard": False,
}
MLP = {"model.name": "mlp", "model.options.hidden": [5], "data.name": "recorded"}
EVERYTHING = {
    **MLP,
    "data.name": "noisy",
    "train.mixup": 0.4,
    "train.ema": 0.9,
    "train.clip_norm": 1.0,
    "train.label_smoothing": 0.1,
    "schedule.warmup_epochs": 1,
}
CNN = {
    "model.name": "residual_cnn",
    "model.options.widths": [4, 4],
    "model.options.groups": 2,
    "data.name": "noisy",
    "train.accumulate": 2,
    "train.drop_last": True,
}
GPT = {
    "model.name": "gpt",
    "model.options.layers": 1,
    "model.options.width": 8,
    "model.options.heads": 2,
    "model.options.dropout": 0.2,
    "data.name": "tokens",
    "optimizer.name": "AdamW",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_norm_and_bias": False,
    "train.ema": 0.9,
}
WORKERS = {"data.workers": 2}
# So bright that gradients overflow in the first steps: the loss scale falls, and is part of what
# must be resumed.
HALF = {**MLP, "data.name": "bright", "train.precision": "fp16", "optimizer.lr": 1e-6}


def tiny(out: Path, *parts: dict[str, Any], **more: Any) -> Job:
    """A job in the directory `out`; later settings win. A name in `more` has __ for each dot."""
    settings = dict(COMMON)
    for part in (*parts, {name.replace("__", "."): value for name, value in more.items()}):
        settings |= part
    settings["out"] = str(out)
    flags = [
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in settings.items()
    ]
    return read(None, flags).job


class Undrawn(Training):
    """A run that draws no curves at its end: they would take as long as all the rest."""

    def _finish(self) -> None:
        self.log.close()


def trains(job: Job) -> int:
    """What a rank does: the job, to its end or to exit code 75. Returns its steps."""
    training = Undrawn(job)
    go(training)
    return training.step


def go(training: Training) -> None:
    """As `shoal.train.loop.train`, with a Training of ours."""
    with claim_for_all(training.job, training.run.mesh):
        training.resume()
        training.run_all()


class StopsAfter(Undrawn):
    """Gets a signal right after its optimizer step `step`, on one rank or on all."""

    def __init__(self, job: Job, step: int, number: int, rank: int | None) -> None:
        super().__init__(job)
        self.stop_at, self.number, self.only = step, number, rank

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step == self.stop_at and self.only in (None, self.run.rank):
            os.kill(os.getpid(), self.number)


def is_signalled(
    job: Job, step: int, number: int = signal.SIGTERM, rank: int | None = None
) -> None:
    """What a rank does: the job, with a signal to itself (to `rank` alone, if given) after
    `step`.
    """
    go(StopsAfter(job, step, number, rank))


def is_resumed(job: Job) -> dict[str, Tensor]:
    """What a rank holds after a resume, whole."""
    training = Undrawn(job)
    training.resume()
    tensors, _, _ = training.run.state()
    training.log.close()
    state = training.state
    tensors |= {"sums": state.sums} | (state.ema.state() if state.ema else {})
    return {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}


class FillsTheDisk(Undrawn):
    """Saves of some steps find no room: no file may grow beyond 500 bytes while they last."""

    def __init__(self, job: Job, steps: tuple[int, ...]) -> None:
        super().__init__(job)
        self.full_at = steps

    def _save(self, best: bool = False, must_succeed: bool = False) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.step in self.full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        try:
            super()._save(best, must_succeed)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fills_the_disk(job: Job, steps: tuple[int, ...]) -> None:
    """What a rank does: the job, on a disk that is full when these steps are saved."""
    go(FillsTheDisk(job, steps))


class Calls:
    """Counts the calls, Python's and C's, that this process makes in each part of a run; dies at
    one of them. Calls made while it waits for other ranks are a part of their own: a busy machine
    has more of them.

    Args: part: "training" (within an epoch, but in no save) or "saving". point: dies at this call
    in it; 0 never."""

    def __init__(self, part: str = "", point: int = 0) -> None:
        self.part, self.point = part, point
        self.counts = {"training": 0, "saving": 0, "waiting": 0}
        self._codes = {Training._epoch.__code__: "training", Checkpoints.save.__code__: "saving"}
        for wait in (Waiter.until, Waiter.poll_for, Waiter.until_without_spinning):
            self._codes[wait.__code__] = "waiting"
        self._inside: list[str] = []

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event in ("call", "return") and frame.f_code in self._codes:
            if event == "return":
                self._inside.pop()
                return
            self._inside.append(self._codes[frame.f_code])
        if event in ("call", "c_call") and self._inside:
            inside = self._inside[-1]
            self.counts[inside] += 1
            if inside == self.part and self.counts[inside] == self.point:
                os.kill(os.getpid(), signal.SIGKILL)


def counts_calls(job: Job) -> dict[str, int]:
    """What a rank does: the job, undisturbed. Returns how many calls there were in each part."""
    training, calls = Undrawn(job), Calls()
    sys.setprofile(calls.watch)
    go(training)
    sys.setprofile(None)
    return calls.counts


def dies(job: Job, rank: int, part: str, point: int) -> None:
    """What a rank does: the job, until `rank` is killed at one of its calls."""
    training = Undrawn(job)
    if training.run.rank == rank:
        sys.setprofile(Calls(part, point).watch)
    go(training)


def everything(directory: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for the times: what two runs that are equal to the last
    bit agree in.
    """
    checkpoints = directory / "checkpoints"
    last = newest(checkpoints)
    assert last is not None
    return {
        "tensors": tensor_files.read(last, lambda _: True),  # every rank's own included
        "info": {name: value for name, value in read_info(last).items() if name not in TIMES},
        "metrics": metrics(directory),
        "checkpoints": sorted(path.name for path in checkpoints.iterdir()),
        "latest": (checkpoints / "latest").read_text(),
        "best": (checkpoints / "best").read_text(),
    }


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, whole."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without their times."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in lines
    ]


def assert_equal_to_the_bit(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both from `everything`."""
    found, expected = dict(found), dict(expected)
    assert differing(found.pop("tensors"), expected.pop("tensors")) == []
    assert found == expected, [
        (k, found.get(k), v) for k, v in expected.items() if found.get(k) != v
    ]


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not bit-equal, or only on one side. NaN equals NaN here."""
    both = found.keys() & expected.keys()
    same = {name for name in both if torch.equal(bits(found[name]), bits(expected[name]))}
    return sorted((found.keys() | expected.keys()) - same)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def dies_before(job: Job, hint: str, step: int) -> None:
    """What a rank does: the job, until rank 0 is killed when the checkpoint of `step` is there
    and its hint is not.
    """
    replace = os.replace

    def deadly(source: Any, target: Any) -> None:
        if Path(target).name == hint and f"{step:08d}" in Path(source).read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = deadly  # type: ignore[assignment]
    trains(job)
