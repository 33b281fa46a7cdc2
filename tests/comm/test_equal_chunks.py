"""All-to-all and all-gather give the same values on every kind of group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import equal_chunks
from shoal.testing import world
from tests.harness.in_turn import in_turn


def _exchanged(sent: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    crossed, gathered = torch.full_like(sent, -1).detach(), torch.full_like(sent, -1).detach()
    equal_chunks.all_to_all(crossed, sent, group)
    equal_chunks.all_gather(
        gathered, sent[: len(sent) // dist.get_world_size()].contiguous(), group
    )
    return crossed, gathered


def _every_rank_s_row(backend: str) -> bool:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend=backend)
    for length in (0, 1, 70_000):
        crossed, gathered = _exchanged(torch.arange(size * length) + 100 * rank, group)
        for other in range(size):
            own = slice(other * length, (other + 1) * length)
            assert crossed[own].equal(
                torch.arange(rank * length, (rank + 1) * length) + 100 * other
            )
            assert gathered[own].equal(torch.arange(length) + 100 * other)
    return True


def test_each_rank_gets_every_rank_s_row() -> None:
    found = world.run(3, in_turn, _every_rank_s_row, ("gloo",), ("shoal",), ("shoal_gloo",))
    assert found == [[True, True, True]] * 3


def _with_a_gradient() -> bool:
    sent = torch.ones(6, dtype=torch.float64, requires_grad=True)
    return any(found.requires_grad for found in _exchanged(sent, dist.new_group(backend="gloo")))


def test_numbers_with_a_gradient_are_sent_without_it() -> None:
    assert world.run(2, _with_a_gradient) == [False, False]


def _beside_a_message() -> Any:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    found = torch.empty(1000)
    arriving = dist.irecv(found, (rank - 1) % size, group=group)
    _exchanged(torch.arange(3000.0), group)
    dist.send(torch.full((1000,), 7.0 + rank), (rank + 1) % size, group=group)
    assert arriving is not None
    arriving.wait()
    return found.unique().tolist()


def test_messages_of_others_are_not_taken_for_rows() -> None:
    assert world.run(3, _beside_a_message) == [[9.0], [7.0], [8.0]]
