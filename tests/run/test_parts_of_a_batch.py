"""A loss of parts of a batch: states that go from batch to batch, sizes, and failures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SEQUENCES = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def carried(strategy: str, accumulate: int) -> list[float]:
    """Train a network whose states go from batch to batch, with their samples first."""
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(3)
    net = nn.LSTM(6, 5, batch_first=True).double()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    x = run.share(SEQUENCES)
    states = [torch.zeros(len(x), 1, 5, dtype=torch.float64)] * 2

    def compute_loss(x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out, new = net(x, [state.transpose(0, 1).contiguous() for state in states])
        return (out**2).mean(), [state.detach().transpose(0, 1) for state in new]

    losses = []
    for begin in (0, 3, 6):
        loss, states = run.forward_backward(compute_loss, x[:, begin : begin + 3], states)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_states_with_their_samples_first_go_from_batch_to_batch_as_on_one_device() -> None:
    expected = carried("single", 1)
    for by_ddp, by_zero3 in world.run(2, in_turn, carried, ("ddp", 1), ("zero3", 2)):
        assert by_ddp == pytest.approx(expected, rel=1e-12)
        assert by_zero3 == pytest.approx(expected, rel=1e-12)


def words_of_recurrent() -> tuple[str, list[str]]:
    """Return the error and its notes of a loss that knows the size of the whole batch."""
    run = shoal.init("ddp", precision="fp64", announce=lambda _: None)
    net = nn.RNN(6, 5, batch_first=True).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as raised:
        run.forward_backward(
            lambda x: net(x)[0].view(8, -1, 5).mean(1).mean(), run.share(ROWS.view(8, 1, 6))
        )
    return str(raised.value), raised.value.__notes__


def test_an_error_of_code_that_knows_the_whole_batch_tells_how_many_samples_it_was_given() -> None:
    for said, notes in world.run(2, words_of_recurrent):
        assert "invalid for input of size" in said
        assert any("its 4 samples (of 8 in the batch)" in note for note in notes)


def loop_with_targets_of_the_whole_batch() -> None:
    run = shoal.init("ddp", precision="fp64", announce=lambda _: None)
    net = nn.Linear(6, 2).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = run.share(ROWS)
    run.backward(nn.functional.binary_cross_entropy_with_logits(net(x), torch.ones(8, 2).double()))


def test_an_error_of_a_loop_that_speaks_of_the_whole_batch_tells_how_many_samples_it_has() -> None:
    with pytest.raises(LaunchError, match="this rank has 4 samples, of 8 in the batch"):
        world.run(2, loop_with_targets_of_the_whole_batch)


def hardest_rows(strategy: str, accumulate: int) -> str:
    """Return the error of a loss that takes the 2 hardest samples of each part."""
    run = shoal.init(strategy, accumulate=accumulate, announce=lambda _: None)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = run.share(torch.randn(6, 3))
    with pytest.raises(UsageError) as raised:
        run.forward_backward(lambda x: model(x).squeeze(1).topk(2).values.mean(), x)
    return str(raised.value)


def test_a_loss_that_fails_on_a_part_is_refused_for_that_in_micro_batches() -> None:
    of_stages = world.run(2, hardest_rows, "pipeline=2,microbatches=6", 1)
    for text in (hardest_rows("single", 6), *of_stages):
        assert "it runs on 6 samples and fails on 1 of them" in text
        assert "selected index k out of range at test_parts_of_a_batch.py:" in text
        assert "run.gather(tensor)" in text
