"""Right loops of data parallelism, by hand: each rank computes its own rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mutants.loop import Batch, Loop, count, token_losses


class DataParallel(Loop):
    """Counts the labels of all ranks, and averages gradients in one flat message."""

    def passes(self, batches: list[Batch]) -> None:
        total = self.count(batches)
        for index, batch in enumerate(batches):
            loss = self.objective(batch, total)
            loss.backward()
            self.after_micro_batch(index)

    def count(self, batches: list[Batch]) -> Tensor:
        """Return the number of labels by which this step's losses are divided."""
        return self.peers.sum(count(batches))

    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        """Return the loss of a micro-batch, so that the mean over ranks is the global one."""
        tokens, labels = batch
        return token_losses(self.call(tokens), labels) * self.peers.size / total

    def after_micro_batch(self, index: int) -> None:
        """Follow the backward pass of a micro-batch."""

    def reduce(self) -> None:
        reduced = self.reduced()
        flat = torch.cat([gradient.flatten() for gradient in reduced.values()])
        flat = self.average(flat)
        parts = flat.split([gradient.numel() for gradient in reduced.values()])
        for gradient, part in zip(reduced.values(), parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def reduced(self) -> dict[str, Tensor]:
        """Return the gradients that the message holds, by name."""
        return self.gradients()

    def average(self, flat: Tensor) -> Tensor:
        """Return the mean of a flat tensor over the ranks."""
        return self.peers.sum(flat) / self.peers.size


class Accumulating(DataParallel):
    """Two micro-batches on each rank before a step."""

    micro_batches = 2
    shares = (3, 2)


class Clipped(DataParallel):
    """Clips the norm of all gradients to a small number, so that it always acts."""

    max_norm = 0.2

    def clip(self) -> None:
        factor = (self.max_norm / self.norm()).clamp(max=1.0)
        for gradient in self.gradients().values():
            gradient.mul_(factor)

    def norm(self) -> Tensor:
        """Return the norm of all gradients."""
        return torch.stack([g.norm() for g in self.gradients().values()]).norm()
