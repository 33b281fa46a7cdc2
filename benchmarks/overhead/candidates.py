"""The same training, written for each library as its own tutorial writes it. One `epoch()` is one
pass over the data.

Every loop takes one optimizer step for each batch of RANK_BATCH samples on every rank, and drops an
incomplete batch."""

from __future__ import annotations

from collections.abc import Callable

import lightning
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import shoal
from benchmarks.overhead.tasks import RANK_BATCH, Task, optimizer
from shoal.run.supervised import supervised


class HandWritten:
    """The yardstick: DistributedDataParallel with its defaults."""

    name = "hand-written DDP"

    def __init__(self, task: Task, ranks: int, shuffle: bool) -> None:
        self.model = DistributedDataParallel(task.model())
        self.optimizer = optimizer(self.model.parameters())
        self.sampler = DistributedSampler(task.dataset, shuffle=shuffle)
        self.loader = DataLoader(task.dataset, RANK_BATCH, sampler=self.sampler, drop_last=True)
        self.epochs = 0

    def epoch(self) -> Tensor:
        self.sampler.set_epoch(self.epochs)
        self.epochs += 1
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        return loss.detach()


class Shoal:
    """Its batch size is the global one."""

    name = "Shoal"

    def __init__(self, task: Task, ranks: int, shuffle: bool) -> None:
        self.run = shoal.init(announce=lambda _: None)
        model = task.model()
        loader = DataLoader(task.dataset, RANK_BATCH * ranks, shuffle=shuffle, drop_last=True)
        self.model, self.optimizer, self.loader = self.run.prepare(
            model, optimizer(model.parameters()), loader
        )

    def epoch(self) -> Tensor:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.run.forward_backward(supervised(F.cross_entropy, self.model), x, y)
            self.optimizer.step()
        return loss


class Accelerate:
    name = "Accelerate"

    def __init__(self, task: Task, ranks: int, shuffle: bool) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = task.model()
        loader = DataLoader(task.dataset, RANK_BATCH, shuffle=shuffle, drop_last=True)
        prepared = self.accelerator.prepare(model, optimizer(model.parameters()), loader)
        self.model, self.optimizer, self.loader = prepared

    def epoch(self) -> Tensor:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
        return loss.detach()


class Fabric:
    name = "Lightning Fabric"

    def __init__(self, task: Task, ranks: int, shuffle: bool) -> None:
        self.fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
        self.fabric.launch()
        model = task.model()
        self.model, self.optimizer = self.fabric.setup(model, optimizer(model.parameters()))
        loader = DataLoader(task.dataset, RANK_BATCH, shuffle=shuffle, drop_last=True)
        self.loader = self.fabric.setup_dataloaders(loader)

    def epoch(self) -> Tensor:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            self.fabric.backward(loss)
            self.optimizer.step()
        return loss.detach()


LOOPS = (HandWritten, Shoal, Accelerate, Fabric)


class Trainer(lightning.LightningModule):
    """Lightning's Trainer owns the loop, so it is `fit` that calls us before and after each of
    its epochs.
    """

    name = "Lightning Trainer"

    def __init__(self, task: Task, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self.model, self.loss = task.model(), nn.Parameter().detach()
        self.on_train_epoch_start, self.on_train_epoch_end = before, after

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> object:
        return optimizer(self.parameters())


def fit(module: Trainer, task: Task, ranks: int, epochs: int, shuffle: bool) -> None:
    """Train with everything switched off that costs time and can be."""
    # Without a sampler of our own, Lightning puts in one that shuffles, whatever the loader says.
    sampler = DistributedSampler(task.dataset, shuffle=shuffle)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(task.dataset, RANK_BATCH, sampler=sampler, drop_last=True))
