"""Trains the model of this benchmark without Shoal, until it is killed.

    peer_training.py torchrun FOLDER     a rank under torchrun: DDP, a checkpoint each 20 steps
    peer_training.py torchft FOLDER N    replica N of two, in torchft's way: no checkpoints
    peer_training.py horovod FOLDER      a rank under horovodrun: its state in memory each 20 steps

Each step that is done is a line in FOLDER/steps.NUMBER: time, step, process, ranks that took part.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from shoal.models.mlp import MLP

EVERY = 20
STORE_PORT = 29_960


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MLP(num_classes=10, input_shape=(1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind == "torchrun":
        with_checkpoints(folder, model, optimizer)
    elif kind == "horovod":
        with_commits(folder, model, optimizer)
    else:
        with_replicas(folder, int(sys.argv[3]), model, optimizer)


def take_step(model: Callable[..., Any], optimizer: Any) -> None:
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()


def note_step(folder: Path, number: int, step: int, ranks: int) -> None:
    with (folder / f"steps.{number}").open("a") as file:
        file.write(f"{time.monotonic()} {step} {os.getpid()} {ranks}\n")


def with_checkpoints(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    engine = nn.parallel.DistributedDataParallel(model)
    while True:
        take_step(engine, optimizer)
        step += 1
        if rank == 0:
            note_step(folder, 0, step, dist.get_world_size())
        if rank == 0 and step % EVERY == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


def with_replicas(
    folder: Path, number: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    import torchft

    port = STORE_PORT + number
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica-{number}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=port,
    )
    assert store is not None
    engine = torchft.DistributedDataParallel(manager, model)
    stepper = torchft.Optimizer(manager, optimizer)
    before = -1
    while True:
        take_step(engine, stepper)
        if (step := manager.current_step()) > before:
            note_step(folder, number, step, manager.num_participants())
            before = step


def with_commits(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import horovod.torch as hvd

    hvd.init()
    (folder / f"pid.{hvd.rank()}").write_text(str(os.getpid()))
    engine = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            take_step(model, engine)
            state.step += 1
            if hvd.rank() == 0:
                note_step(folder, 0, state.step, hvd.size())
            if state.step % EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=engine, step=0))


if __name__ == "__main__":
    main()
