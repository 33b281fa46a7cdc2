"""Bugs of pipelines: stages, micro-batches, messages, tied matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mutants.loop import Batch
from tests.mutants.mutant import OF_LOSS, planted
from tests.mutants.pipelined import Layer, Pipelined, Tied


@planted(
    "the two stages change places: their blocks are swapped",
    module=("blocks.0", "blocks.1", "blocks.1.norm", "blocks.0.norm"),
    cause="wrong output",
)
class StagesSwapped(Pipelined):
    def first(self) -> list[Layer]:
        return [self.model.embed, self.model.blocks[self.peers.size - 1]]

    def last(self) -> list[Layer]:
        return [self.model.blocks[2 - self.peers.size], self.model.norm, self.model.head]


@planted(
    "the last stage reads micro-batches in another order than its labels",
    module=("blocks.1", "blocks.1.norm"),
    cause="wrong output",
)
class MicroBatchOrder(Pipelined):
    def read(self, received: list[Tensor]) -> list[Tensor]:
        return received[::-1]


@planted(
    "a buffer of messages is used again before it was read",
    module=("blocks.1", "blocks.1.norm"),
    cause="wrong output",
    links=("deepspeedai/DeepSpeed#5545", "NVIDIA/TransformerEngine#1616"),
)
class BufferOverwritten(Pipelined):
    def read(self, received: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            received[0].copy_(received[1])
        return received


@planted(
    "gradients are divided by the number of micro-batches at the border of two stages",
    module="blocks.0.down",
    cause="scale",
    links=("deepspeedai/DeepSpeed#8152",),
)
class ScaledAtTheBorder(Pipelined):
    def incoming_gradient(self, gradient: Tensor) -> Tensor:
        return gradient / self.micro_batches


@planted(
    "micro-batches are summed, not averaged, only when there are stages",
    module=(OF_LOSS, "head"),
    cause="scale",
    links=("deepspeedai/DeepSpeed#7773",),
)
class MicroBatchesSummed(Pipelined):
    def objective(self, output: Tensor, labels: Tensor) -> Tensor:
        return super().objective(output, labels) * (1 if self.peers.size == 1 else 2)


@planted(
    "the loss is not divided by the tokens before the backward pass",
    module=(OF_LOSS, "head"),
    cause="scale",
    links=("pytorch/torchtitan#2972",),
)
class NotDividedByTokens(Pipelined):
    def divisor(self, batches: list[Batch]) -> Tensor:
        total = super().divisor(batches)
        return total if self.peers.size == 1 else torch.ones_like(total)


@planted(
    "activations are rounded to bfloat16 on their way to the next stage",
    module=("blocks.1", "blocks.1.norm"),
    cause="wrong output",
)
class RoundedActivations(Pipelined):
    def read(self, received: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            for tensor in received:
                tensor.copy_(tensor.bfloat16())
        return received


@planted(
    "gradients that return to the first stage meet the other micro-batch",
    module="blocks.0.down",
    cause="wrong gradient",
)
class GradientsOfOtherMicroBatch(Pipelined):
    def order_of_gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return outputs[::-1]


@planted(
    "the stages' gradients are not exchanged: the first rank has none of the last stage",
    module="head",
    cause="missing gradient",
)
class StageNotExchanged(Pipelined):
    def reduce(self) -> None:
        if self.peers.size > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


@planted(
    "a tied matrix gets the gradient of its first use alone",
    module=("embed", "head"),
    cause="wrong gradient",
    links=("NVIDIA/Megatron-LM#844",),
)
class TiedGradientLost(Tied):
    def reduce(self) -> None:
        if self.peers.rank == 1:
            self.model.embed.weight.grad.zero_()
        super().reduce()


@planted(
    "the gradients of both uses of a tied matrix are added up twice",
    module=("embed", "head"),
    cause=("scale",),
)
class TiedGradientTwice(Tied):
    def reduce(self) -> None:
        super().reduce()
        if self.peers.size > 1:
            self.model.embed.weight.grad.mul_(2)
