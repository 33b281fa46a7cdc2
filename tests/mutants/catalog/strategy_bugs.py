"""Bugs inside Shoal's own strategies: one function of each is replaced while the ranks train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shoal.comm.mappings import conjugate
from shoal.parameter_server.worker.client import WorkerClient
from shoal.strategies.ddp import gradient_reducer
from shoal.strategies.ddp.own_buckets import Bucket, OwnBuckets
from shoal.strategies.pipeline.executor import Ties
from shoal.strategies.pipeline.p2p import StageComm
from shoal.strategies.tensor import region, vocabulary
from shoal.strategies.zero import sharded_step
from tests.mutants.catalog.shoal_bugs import WithShoal
from tests.mutants.loop import TOKENS, WIDTH, Tagger
from tests.mutants.mutant import OF_LOSS, planted
from tests.mutants.pipelined import TiedTagger


class Replaced(WithShoal):
    """A loop on Shoal in which `function` of `owner` is what `wrong` makes of the right one."""

    owner: ClassVar[Any]
    function: ClassVar[str]

    def train(self) -> None:
        with ExitStack() as stack:
            if self.peers.size > 1:
                right = getattr(self.owner, self.function)
                stack.enter_context(patch.object(self.owner, self.function, self.wrong(right)))
            super().train()

    def wrong(self, right: Callable[..., Any]) -> Any:
        """Return the function that replaces the right one."""
        raise NotImplementedError


@planted(
    "Shoal's ddp weighs losses by the number of ranks twice",
    module=(OF_LOSS, "head"),
    cause="scale",
)
class DDPWeighsTwice(Replaced):
    owner, function = gradient_reducer, "scaled_for_mean"

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda batch, ranks: right(right(batch, ranks), ranks)


@planted(
    "Shoal's ddp leaves the last parameter of its message as it is",
    module="head",
    cause="missing reduction",
)
class DDPLeavesOneOut(Replaced):
    owner, function = OwnBuckets, "finish_step"

    def wrong(self, right: Callable[..., Any]) -> Any:
        def finish_step(layout: Any, totals: Tensor) -> Tensor:
            last = layout.buckets[0].parameters[0]  # buckets have them in reverse order
            own = last.grad.clone()
            summed: Tensor = right(layout, totals)
            last.grad = own
            return summed

        return finish_step


@planted(
    "Shoal's ddp sends the message of the step before",
    module=(OF_LOSS, "head"),
    cause=("wrong gradient", "missing gradient"),
)
class DDPSendsEarlier(Replaced):
    owner, function = Bucket, "pack"

    def wrong(self, right: Callable[..., Any]) -> Any:
        sent: list[Tensor] = []

        def pack(bucket: Any, *more: Tensor) -> Tensor:
            sent.append(right(bucket))
            return torch.cat((sent[max(0, len(sent) - 2)], *more))

        return pack


@planted(
    "Shoal's zero2 averages over another number of ranks than it weighs losses by",
    module=(OF_LOSS, "head"),
    cause="scale",
)
class ZeroWrongGroup(Replaced):
    strategy = "zero2"
    owner, function = sharded_step, "scaled_for_mean"

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda batch, ranks: batch


@planted("Shoal's zero3 reports the loss of a rank's own rows", module=OF_LOSS, cause="loss")
class ZeroOwnLoss(Replaced):
    strategy = "zero3"
    owner, function = sharded_step, "mean_result"

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda local, totals, ranks: local


class EvenTagger(Tagger):
    """A tagger whose words and labels two ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS + 1, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS + 1)


@planted(
    "Shoal's tensor parallelism averages the gradient of the head's input over the ranks",
    module="norm",
    cause=("scale", "wrong gradient"),
)
class TensorInputHalved(Replaced):
    strategy = "tensor=2"
    owner, function = region, "copy_to_region"

    def build(self) -> nn.Module:
        return EvenTagger()

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda x, axis: conjugate(right(x, axis), Tensor.detach, lambda g: g / 2)


@planted(
    "Shoal's tensor parallelism adds up twice what ranks have looked up in the embedding",
    module="embed",
    cause="wrong output",
)
class TensorEmbeddingTwice(Replaced):
    strategy = "tensor=2"
    owner, function = vocabulary, "sum_of_ranks"

    def build(self) -> nn.Module:
        return EvenTagger()

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda x, axis, shard_dim: right(x, axis, shard_dim) * 2


@planted(
    "Shoal's pipeline halves the gradients that come back from the next stage",
    module=("blocks.0.down", "blocks.0", "blocks.1.down", "norm"),
    cause="scale",
)
class PipelineHalves(Replaced):
    strategy = "pipeline=2"
    owner, function = StageComm, "recv_backward"

    def wrong(self, right: Callable[..., Any]) -> Any:
        def recv_backward(comm: Any, message: Any) -> list[Tensor | None]:
            return [None if g is None else g / 2 for g in right(comm, message)]

        return recv_backward


@planted(
    "Shoal's pipeline reads the first micro-batch twice",
    module=("blocks.1.norm", "blocks.1.up", "blocks.1", "norm", "blocks.0.down"),
    cause="wrong output",
)
class PipelineReadsFirst(Replaced):
    strategy = "pipeline=2,microbatches=2"
    owner, function = StageComm, "recv_forward"

    def wrong(self, right: Callable[..., Any]) -> Any:
        first: list[Tensor] = []

        def recv_forward(comm: Any, message: Any) -> tuple[list[Tensor], Any]:
            values, metas = right(comm, message)
            first.extend(value.detach().clone() for value in values if not first)
            with torch.no_grad():
                for value, earlier in zip(values, first, strict=False):
                    value.copy_(earlier[: len(value)])
            return values, metas

        return recv_forward


@planted(
    "Shoal's pipeline keeps the gradients of a tied matrix apart",
    module=("embed", "head"),
    cause=("wrong gradient", "missing reduction"),
)
class PipelineTiesApart(Replaced):
    strategy = "pipeline=2"
    owner, function = Ties, "_sum_over_ranks"

    def build(self) -> nn.Module:
        return TiedTagger()

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda ties, gradient, ranks: gradient


@planted(
    "Shoal's worker pushes the gradient of the step before to its server",
    module=(OF_LOSS, "head", "embed"),
    cause=("wrong gradient", "update"),
)
class ServerStalePush(Replaced):
    strategy = "server=1"
    owner, function = WorkerClient, "push"

    def wrong(self, right: Callable[..., Any]) -> Any:
        before: dict[int, Tensor] = {}

        def push(client: Any, part: int, gradient: Tensor, *rest: Any) -> None:
            stale = before.get(part, gradient)
            before[part] = gradient.clone()
            right(client, part, stale if torch.is_floating_point(stale) else gradient, *rest)

        return push


@planted(
    "Shoal's worker pushes twice what one partition has",
    module=(OF_LOSS, "head", "embed"),
    cause=("scale", "wrong gradient", "update"),
)
class ServerCountsTwice(Replaced):
    strategy = "server=1"
    owner, function = WorkerClient, "push"

    def wrong(self, right: Callable[..., Any]) -> Any:
        return lambda client, part, gradient, *rest: right(client, part, gradient * 2, *rest)
