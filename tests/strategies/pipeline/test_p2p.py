"""Messages between stages: who sends which to whom, in which order, with which header."""

import pytest
import torch
import torch.distributed as dist

from shoal.comm.axis import Axis
from shoal.errors import UsageError
from shoal.strategies.pipeline.division import NameTree, collect
from shoal.strategies.pipeline.engine import ScheduleExecutor, StageOutput
from shoal.strategies.pipeline.p2p import (
    Message,
    P2PLink,
    StageComm,
    TensorMeta,
    acknowledged,
    decode_metas,
    encode_metas,
    message_after,
    message_before,
    messages,
)
from shoal.strategies.pipeline.schedules import SCHEDULES, problems, table
from shoal.testing import world
from shoal.trace.recorder import Recorder


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 1)])
def test_every_message_that_is_needed_is_sent_once(
    name: str, ranks: int, microbatches: int
) -> None:
    if problems(name, ranks, microbatches):
        pytest.skip("no such table")
    made = table(name, ranks, microbatches)
    for receiver, row in enumerate(made.rows):
        needed = [
            message for action in row if (message := message_before(made, action)) is not None
        ]
        own = [message for action in row if (message := message_after(made, action)) is not None]
        sent = [message for sender in range(ranks) for message in messages(made, sender, receiver)]
        assert sorted(set(needed) - set(own)) == sorted(sent)
        assert len(needed) == len(set(needed))


def test_a_header_has_dtypes_shapes_and_who_has_a_gradient() -> None:
    metas = (
        TensorMeta(torch.float64, (3, 1, 7), True),
        TensorMeta(torch.bool, (), False),
        TensorMeta(torch.bfloat16, (0, 5), True),
    )
    assert decode_metas(encode_metas(metas, torch.device("cpu"))) == metas
    assert decode_metas(encode_metas((), torch.device("cpu"))) == ()


def test_more_tensors_than_a_header_describes_are_refused() -> None:
    with pytest.raises(UsageError, match="100 tensors cross one cut"):
        encode_metas((TensorMeta(torch.float32, (1,), True),) * 100, torch.device("cpu"))


class NamedLikeMethods(torch.nn.Module):
    """Layers with the names of methods of ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.items = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.keys = torch.nn.Parameter(torch.ones(2))


def test_layers_may_have_the_names_of_a_container_s_methods() -> None:
    model = NamedLikeMethods()
    kept = collect(model, {"values", "items", "keys"})
    assert isinstance(kept, NameTree)
    assert dict(kept.named_modules())["values"] is model.values
    assert set(kept.state_dict()) == set(model.state_dict())
    assert dict(kept.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_an_arrival_acknowledges_the_latest_message_that_its_sender_needed() -> None:
    """1F1B on two ranks: rank 1 sends the gradients of a micro-batch after it has received the
    activations of that micro-batch, and before it receives the next ones.
    """
    made = table("1f1b", 2, 4)
    for microbatch in range(4):
        reply = Message("B", 0, microbatch)
        assert acknowledged(made, reply) == Message("F", 0, microbatch)
    assert acknowledged(made, Message("F", 0, 0)) is None
    assert acknowledged(made, Message("F", 0, 1)) is None
    assert acknowledged(made, Message("F", 0, 2)) == Message("B", 0, 0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_only_messages_that_were_sent_before_are_acknowledged(name: str, ranks: int) -> None:
    made = table(name, ranks, 1 if name == "naive" else 8)
    sent: set[Message] = set()
    received: set[Message] = set()
    for action in (each.action for each in made.order):
        needed = message_before(made, action)
        if needed is not None:
            earlier = acknowledged(made, needed)
            assert earlier is None or (earlier in sent and earlier in received)
            received.add(needed)
        produced = message_after(made, action)
        if produced is not None:
            sent.add(produced)


def num_in_flight(link: P2PLink) -> int:
    """Return how many sent tensors are still alive for their sends."""
    return sum(map(len, link._in_flight.values()))


def sends_in_flight(schedule: str, num_microbatches: int, two_groups: bool) -> list[int]:
    """Run a step of two stages over Gloo; count after each action the tensors held for sends.

    Args: two_groups: messages to lower ranks have a group of their own, as on GPUs.
    """
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    axis = Axis(rank, 2, torch.device("cpu"), group=group)
    downward = dist.new_group(backend="gloo") if two_groups else None
    link = P2PLink(axis, Recorder(), downward)
    made = table(schedule, 2, num_microbatches)
    weight = torch.nn.Parameter(torch.ones(3))

    def compute(stage: int, microbatch: int, values: tuple[torch.Tensor, ...]) -> StageOutput:
        if stage == 1:
            return StageOutput((), (values[0] * weight).sum())
        return StageOutput((weight * (microbatch + 1),))

    comm = StageComm(link, made, lambda _: "")
    engine = ScheduleExecutor(comm, compute, lambda _: [weight])
    counts = [num_in_flight(link) for _ in engine.run()]
    # d/dw of the sum over micro-batches of m * w * v, with w = v = 1
    total = sum(range(1, num_microbatches + 1))
    torch.testing.assert_close(weight.grad, torch.full((3,), float(total)))
    assert num_in_flight(link) == 0
    return counts


@pytest.mark.parametrize("two_groups", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_sent_tensors_are_freed_when_a_reply_shows_their_arrival(
    schedule: str, two_groups: bool
) -> None:
    """Gloo calls no send complete before somebody has waited for it."""
    for counts in world.run(2, sends_in_flight, schedule, 16, two_groups):
        # Two micro-batches are in flight with two ranks; the next one may have been sent, and the
        # headers of the first messages count too.
        assert max(counts) <= 4
