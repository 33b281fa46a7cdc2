"""A right loop over two stages, by hand: rank 0 has the first layers, rank 1 the last ones.

rank 0   forward 0   forward 1   -            backward 0   backward 1
rank 1   -           forward 0   forward 1    and backward passes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed, nn

from tests.mutants.loop import LENGTH, STEPS, WIDTH, Batch, Loop, Tagger, count, token_losses

Layer = Callable[[Tensor], Tensor]


class Pipelined(Loop):
    """Every rank holds the whole model, computes its stage, and gets the other's gradients."""

    micro_batches = 2
    shares = (4,)

    def orders(self) -> Iterator[list[int]]:
        size = sum(self.shares)
        starts = range(0, size * STEPS * self.micro_batches, size)
        return (list(range(start, start + size)) for start in starts)

    def passes(self, batches: list[Batch]) -> None:
        self.total = self.divisor(batches)
        if self.peers.size == 1:
            for tokens, labels in batches:
                x = tokens
                for stage in (self.first, self.last):
                    x = self.compute(stage(), x)
                self.objective(x, labels).backward()
        elif self.peers.rank == 0:
            self.as_first(batches)
        else:
            self.as_last(batches)

    def divisor(self, batches: list[Batch]) -> Tensor:
        """Return the number by which losses of this step are divided."""
        return count(batches)

    def objective(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return token_losses(output, labels) / self.total

    def first(self) -> list[Layer]:
        """Return the layers of rank 0."""
        return [self.model.embed, self.model.blocks[0]]

    def last(self) -> list[Layer]:
        """Return the layers of rank 1."""
        return [self.model.blocks[1], self.model.norm, self.model.head]

    def compute(self, layers: list[Layer], x: Tensor) -> Tensor:
        """Return what the layers of a stage give."""
        for layer in layers:
            x = layer(x)
        return x

    def as_first(self, batches: list[Batch]) -> None:
        """Compute the first stage; the reported loss is that of the last one."""
        outputs = [self.compute(self.first(), tokens) for tokens, _ in batches]
        for output in outputs:
            distributed.send(self.outgoing(output.detach()), 1)
        for output in self.order_of_gradients(outputs):
            gradient, loss = torch.empty_like(self.outgoing(output.detach())), torch.zeros(())
            distributed.recv(gradient, 1)
            distributed.recv(loss, 1)
            through = (output * self.incoming_gradient(gradient.to(output.dtype))).sum()
            (through - through.detach() + loss).backward()

    def as_last(self, batches: list[Batch]) -> None:
        """Compute the last stage, and send the gradients back."""
        received = []
        for tokens, _ in batches:
            x = torch.empty(len(tokens), LENGTH, WIDTH, dtype=self.wire(), requires_grad=True)
            with torch.no_grad():
                distributed.recv(x, 0)
            received.append(x)
        inputs = self.read(received)
        for x, (_, labels) in zip(inputs, batches, strict=True):
            loss = self.objective(self.compute(self.last(), x.to(self.dtype())), labels)
            loss.backward()
            distributed.send(x.grad, 0)
            distributed.send(loss.detach(), 0)

    def dtype(self) -> torch.dtype:
        """Return the dtype of activations between the stages."""
        return torch.get_default_dtype()

    def wire(self) -> torch.dtype:
        """Return the dtype in which they are sent."""
        return self.dtype()

    def outgoing(self, x: Tensor) -> Tensor:
        """Return an activation as it is sent."""
        return x.to(self.wire()).contiguous()

    def read(self, received: list[Tensor]) -> list[Tensor]:
        """Return the inputs of the last stage, in the order of the micro-batches."""
        return received

    def order_of_gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs of the first stage in the order in which gradients arrive."""
        return outputs

    def incoming_gradient(self, gradient: Tensor) -> Tensor:
        """Return a gradient that has arrived at the first stage."""
        return gradient

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.peers.sum(parameter.grad)


class TiedTagger(Tagger):
    """A tagger whose head has the matrix of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Tied(Pipelined):
    """The first and the last layer, on two ranks, share a matrix."""

    def build(self) -> nn.Module:
        return TiedTagger()
