"""The same steps on one device: by hand, by Shoal, as nanoGPT takes them, and by `fully_shard`.

All run the forward pass under bf16 autocast, get batches that lie in pinned memory, and compile the
model if asked to. An epoch ends when the device has done all of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

import shoal
from benchmarks.gpu.tasks import Task, wait_for
from shoal.run.preparation import Nonfinite
from shoal.run.supervised import supervised

Epoch = Callable[[], None]
Candidate = Callable[[Task, torch.device, bool], Epoch]


class Batches(Dataset):
    """As many ready-made batches as an epoch has steps, pinned beforehand: a loader without workers
    would copy them between steps, which is hidden only where no step waits for the device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        torch.manual_seed(1)
        batches = [task.batch() for _ in range(min(task.steps, 4))]
        if device.type == "cuda":
            batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
        self.batches = batches
        self.steps = task.steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batches[index % len(self.batches)]


def loader_of(task: Task, device: torch.device) -> DataLoader:
    return DataLoader(Batches(task, device), batch_size=None, pin_memory=device.type == "cuda")


def model_of(task: Task, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = task.model().to(device)
    return model.to(memory_format=torch.channels_last) if task.channels_last else model


def autocast(device: torch.device) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = torch.autocast(device.type, torch.bfloat16)
    return context


def moved(task: Task, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
    return (x.contiguous(memory_format=torch.channels_last) if task.channels_last else x), y


def by_hand(task: Task, device: torch.device, compiles: bool) -> Epoch:
    model = model_of(task, device)
    optimizer, loader = task.optimizer(model), loader_of(task, device)
    if compiles:
        model.compile()

    def epoch() -> None:
        for batch in loader:
            x, y = moved(task, batch, device)
            optimizer.zero_grad()
            with autocast(device):
                loss = task.loss(model(x), y)
            loss.backward()
            optimizer.step()
        wait_for(device)

    return epoch


def by_shoal(
    task: Task,
    device: torch.device,
    compiles: bool,
    strategy: str = "single",
    nonfinite: Nonfinite = "skip",
) -> Epoch:
    run = shoal.init(
        strategy,
        precision="bf16",
        compile=compiles,
        nonfinite=nonfinite,
        announce=lambda _: None,
    )
    model = model_of(task, run.device)
    optimizer = task.optimizer(model)
    model, optimizer, loader = run.prepare(model, optimizer, loader_of(task, device))
    compute_loss = supervised(task.loss, model)

    def epoch() -> None:
        for batch in loader:
            x, y = run.to_device(batch)
            if task.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            run.forward_backward(compute_loss, x, y, rows=len(y))
            optimizer.step()
        wait_for(device)

    return epoch


def as_nano_gpt(task: Task, device: torch.device, compiles: bool) -> Epoch:
    """Take the steps of nanoGPT's train.py: a disabled scaler, clipping, the next batch early."""
    model = model_of(task, device)
    optimizer, batches = task.optimizer(model), Batches(task, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    if compiles:
        model.compile()

    def fetch(index: int) -> tuple[Tensor, Tensor]:
        return moved(task, batches[index], device)

    def epoch() -> None:
        x, y = fetch(0)
        for index in range(task.steps):
            with autocast(device):
                loss = task.loss(model(x), y)
            x, y = fetch(index + 1)  # while the device computes the forward pass
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        wait_for(device)

    return epoch


def by_fully_shard(task: Task, device: torch.device, compiles: bool) -> Epoch:
    """Take steps of torch's `fully_shard` on a mesh of one device."""
    model = model_of(task, device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, loader = task.optimizer(model), loader_of(task, device)
    if compiles:
        model.compile()

    def epoch() -> None:
        for batch in loader:
            x, y = moved(task, batch, device)
            optimizer.zero_grad()
            task.loss(model(x), y).backward()
            optimizer.step()
        wait_for(device)

    return epoch


def candidates(task: Task) -> dict[str, Candidate]:
    """Return the loops of a task by name; the first is the yardstick."""
    found: dict[str, Candidate] = {
        "by hand": by_hand,
        "Shoal": by_shoal,
        "Shoal, nonfinite=ignore": partial(by_shoal, nonfinite="ignore"),
        "Shoal, recompute": partial(by_shoal, strategy="recompute"),
    }
    if task.adamw:
        found |= {"nanoGPT's loop": as_nano_gpt, "fully_shard": by_fully_shard}
    return found
