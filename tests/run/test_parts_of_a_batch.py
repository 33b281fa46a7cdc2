"""A loss of parts of a batch: states that go from batch to batch, sizes, the hardest samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.testing import world

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 3
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


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("zero3", 2)])
def test_states_with_their_samples_first_go_from_batch_to_batch_as_on_one_device(
    strategy: str, accumulate: int
) -> None:
    expected = carried("single", 1)
    for losses in world.run(2, carried, strategy, accumulate):
        assert losses == pytest.approx(expected, rel=1e-12)


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


def hardest(strategy: str, accumulate: int) -> float:
    """Return the loss of the two samples of the batch with the largest losses."""
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(net(x), y, reduction="none")
        return run.gather(losses).topk(2).values.mean()

    return run.forward_backward(compute_loss, *run.share((ROWS, LABELS))).item()


def test_a_loss_of_two_samples_takes_them_from_gathered_rows_where_parts_have_one() -> None:
    expected = hardest("single", 1)
    assert world.run(2, hardest, "ddp", 4) == pytest.approx([expected] * 2, rel=1e-12)
