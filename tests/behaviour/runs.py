"""Seeded runs of a few steps in small worlds, through `shoal.init` and `prepare`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world

from . import models
from .circumstances import digest

STEPS = 5


@dataclass(frozen=True)
class SeededRun:
    """One run: STEPS steps over batches of 8, 8, 5, 8 and 8 samples.

    Attributes:
        strategy, ranks: as of `shoal launch`.
        model, optimizer: as in `models`.
        accumulate: parts of each rank's share.
        clip: largest norm of the gradients; 0 for any.
        interrupted: the run is saved after two steps, and another world goes on from there.
    """

    strategy: str
    ranks: int
    model: str
    optimizer: str = "SGD"
    accumulate: int = 1
    clip: float = 0.0
    interrupted: bool = False

    @property
    def steps_apart(self) -> bool:
        """Every rank steps by gradients of its own."""
        return "local=" in self.strategy or "diloco=" in self.strategy


PIPELINE = "pipeline=2,balance=parameters"
EVERY_DAY = {
    "one rank": SeededRun("ddp", 1, "convolutional"),
    "ddp of 2": SeededRun("ddp", 2, "convolutional", clip=0.1),
    "ddp of 3": SeededRun("ddp", 3, "transformer", "AdamW", accumulate=2),
    "ddp in buckets": SeededRun("ddp,bucket_mb=0.001", 3, "convolutional", accumulate=2),
    "ddp by a ring": SeededRun("ddp,allreduce=ring", 3, "perceptron"),
    "ddp in few bytes": SeededRun("ddp,compress=topk=0.2", 2, "perceptron"),
    "ddp of low rank": SeededRun("ddp,compress=powersgd=1", 2, "perceptron", accumulate=2),
    "zero1": SeededRun("zero1", 2, "transformer", "AdamW"),
    "zero2": SeededRun("zero2", 3, "perceptron", "AdamW", clip=0.1),
    "zero3": SeededRun("zero3", 2, "transformer", "AdamW", accumulate=2),
    "tensor": SeededRun("tensor=2", 2, "transformer", clip=0.1),
    "pipeline": SeededRun(f"{PIPELINE},microbatches=4", 2, "transformer"),
    "recomputed": SeededRun("recompute,ddp", 2, "transformer"),
    "three axes": SeededRun(f"tensor=2,{PIPELINE},zero1", 4, "transformer"),
    "servers": SeededRun("server=2", 2, "convolutional", clip=0.1),
    "servers with replicas": SeededRun("server=2,replicas=2", 2, "perceptron", "AdamW"),
    "servers in small parts": SeededRun("server=3,part_mb=0.0005", 2, "transformer", accumulate=2),
    "local": SeededRun("local=2", 2, "perceptron"),
    "diloco": SeededRun("diloco=2", 2, "perceptron"),
    "interrupted": SeededRun("ddp", 2, "convolutional", "AdamW", interrupted=True),
    "interrupted zero2": SeededRun("zero2", 2, "transformer", "AdamW", interrupted=True),
    "interrupted servers": SeededRun("server=2", 2, "perceptron", "AdamW", interrupted=True),
}
MORE = {
    "ddp in halves": SeededRun("ddp,compress=bf16,bucket_mb=0.001", 3, "convolutional"),
    "ddp by a tree": SeededRun("ddp,allreduce=tree,bucket_mb=0.001", 3, "transformer"),
    "ddp by pairs": SeededRun("ddp,allreduce=halving-doubling", 4, "perceptron"),
    "ddp in one bit": SeededRun("ddp,compress=onebit", 2, "convolutional", accumulate=2),
    "zero3 in groups": SeededRun("zero3,hybrid=2", 4, "perceptron", clip=0.1),
    "zero2 on the CPU": SeededRun("zero2,offload=true", 2, "convolutional", "AdamW"),
    "pipeline in a V": SeededRun(f"{PIPELINE},schedule=zbv,zero1", 4, "transformer", "AdamW"),
    "pipeline in chunks": SeededRun(f"{PIPELINE},schedule=interleaved", 2, "transformer"),
    "tensor and zero3": SeededRun("tensor=2,zero3", 4, "transformer", "AdamW", clip=0.1),
    "tensor in sequence": SeededRun("tensor=2,sequence=true", 2, "transformer", clip=0.1),
    "servers in few bytes": SeededRun("server=2,compress=topk=0.2", 2, "perceptron"),
}
RUNS = {**EVERY_DAY, **MORE}
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass
class Measured:
    """What one rank has seen.

    Attributes:
        losses, norms: of each step, as the exact text of a float.
        gradients: digests, of each step.
        weights: of the whole model in the end.
    """

    losses: list[str]
    norms: list[str]
    gradients: list[str]
    weights: dict[str, Tensor]

    def to_json(self) -> dict[str, Any]:
        """All of it, with a digest in place of the weights."""
        return {**vars(self), "weights": digest(self.weights)}


def measure(name: str, precision: str) -> list[Measured]:
    """Train; what every rank has seen. Starts and ends a world, or two."""
    run = RUNS[name]
    if not run.interrupted:
        return world.run(run.ranks, _train, run, precision, None, STEPS)
    with tempfile.TemporaryDirectory() as directory:
        first = world.run(run.ranks, _train, run, precision, directory, 2)
        second = world.run(run.ranks, _train, run, precision, directory, STEPS - 2)
    return [_joined(before, after) for before, after in zip(first, second, strict=True)]


def _joined(before: Measured, after: Measured) -> Measured:
    return Measured(
        before.losses + after.losses,
        before.norms + after.norms,
        before.gradients + after.gradients,
        after.weights,
    )


def _train(seeded: SeededRun, precision: str, directory: str | None, steps: int) -> Measured:
    """Some steps of one rank; from and to the checkpoint in `directory`, where there is one."""
    torch.set_num_threads(1)
    run = shoal.init(
        seeded.strategy,
        seed=3,
        accumulate=seeded.accumulate,
        precision="fp64" if precision == "fp64" else "fp32",
        announce=_silent,
    )
    parts = models.made(seeded.model, seeded.optimizer, PRECISIONS[precision])
    model, optimizer, loader = run.prepare(*parts)
    checkpoints = None if directory is None else shoal.Checkpoints(Path(directory))
    saved = None if checkpoints is None else checkpoints.load(_silent, like=run.layout_of())
    if saved is not None:
        run.load_state(saved.tensors, saved.info, saved.private)
    measured = Measured([], [], [], {})
    for x, y in _batches(loader, steps):
        optimizer.zero_grad()
        loss = run.forward_backward(supervised(models.loss, model), x, y)
        if seeded.clip:
            run.clip_gradients(seeded.clip)
        _note(measured, loss, _gradients(run, seeded))
        optimizer.step()
    if checkpoints is not None:
        step = len(measured.losses) + (0 if saved is None else saved.step)
        checkpoints.save(step, *run.state())
    measured.weights = {name: value.clone() for name, value in run.weights().items()}
    return measured


def _batches(loader: Any, count: int) -> Iterator[Any]:
    """The next `count` batches, over as many epochs as it takes."""
    left = count
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


def _gradients(run: shoal.Run, seeded: SeededRun) -> dict[str, Tensor]:
    if seeded.steps_apart:
        own: dict[str, nn.Parameter] = run.parameters()
        return {name: p.grad for name, p in own.items() if p.grad is not None}
    return {name: value for name, value in run.gradients().items() if value is not None}


def _note(measured: Measured, loss: Tensor, gradients: dict[str, Tensor]) -> None:
    squares = [value.double().square().sum() for _, value in sorted(gradients.items())]
    measured.losses.append(loss.item().hex())
    measured.norms.append(torch.stack(squares).sum().sqrt().item().hex())
    measured.gradients.append(digest(gradients))


def _silent(_: str) -> None:
    """Announcements are not compared."""
