"""Gradients in pieces, of embedding rows, or of complex parameters: exact, or refused."""

import pytest
import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from unusual_samples import rows

import shoal
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Twice(nn.Module):
    """One layer, recomputed twice, each time in a backward pass inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda h: self.layer(h).tanh(), x, use_reentrant=True)
        found: Tensor = self.head(x)
        return found


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        z = (x * self.wave).sum(1, keepdim=True)
        return z.real + 2 * z.imag + self.bias


class Rows(nn.Module):
    """An embedding with sparse gradients: only the rows that were looked up have one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, sparse=True), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table((x[:, 0].abs() * 3).long().clamp(max=7))
        found: Tensor = self.head(torch.cat([x, looked_up], 1))
        return found


def trained(strategy: str, kind: type[nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights after 8 steps, and the last loss."""
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(rows(), batch_size=6))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(supervised(F.mse_loss, model), x, y)
            optimizer.step()
    return run.weights(), loss


def agree(ranks: int, *calls: tuple[str, type[nn.Module]]) -> None:
    """Assert that weights and losses are those of one process."""
    expected = {kind: trained("single", kind) for _, kind in calls}
    for results in world.run(ranks, in_turn, trained, *calls):
        for (weights, their_loss), (strategy, kind) in zip(results, calls, strict=True):
            alone, loss = expected[kind]
            assert their_loss.dtype == loss.dtype, strategy
            assert float(their_loss) == pytest.approx(float(loss), rel=1e-10), strategy
            assert_same(weights, alone)


@pytest.mark.parametrize(
    "strategy", ["ddp,bucket_mb=0.0001", "ddp,compress=powersgd=100,bucket_mb=0.0001", "server=1"]
)
def test_a_gradient_in_two_pieces_is_refused(strategy: str) -> None:
    with pytest.raises(
        LaunchError, match=r"layer\..*: its gradient came in two pieces.*use_reentrant=False"
    ):
        world.run(2, trained, strategy, Twice)


class TwiceInBlocks(nn.Module):
    """Blocks that are called twice, which under zero are units of their own."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.head, self.reentrant = nn.Linear(6, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        found: Tensor = self.head(x)
        return found


class TwiceWithoutReentrance(TwiceInBlocks):
    def __init__(self) -> None:
        super().__init__(reentrant=False)


def refused_and_trained_after(strategy: str) -> tuple[str, dict[str, Tensor]]:
    try:
        trained(strategy, TwiceInBlocks)
    except UsageError as error:
        return str(error), trained(strategy, TwiceWithoutReentrance)[0]
    return "it was not refused", {}


def test_zero_refuses_a_unit_that_is_recomputed_twice_and_trains_another_model_after() -> None:
    expected, _ = trained("single", TwiceWithoutReentrance)
    for error, weights in world.run(2, refused_and_trained_after, "zero3"):
        assert "its gradient came in two pieces" in error
        assert "use_reentrant=False" in error
        assert_same(weights, expected)


def test_what_is_sent_after_the_backward_pass_may_come_in_two_pieces() -> None:
    agree(2, ("local=1", Twice), ("ddp", Twice))


def test_ddp_takes_complex_parameters_and_sparse_gradients() -> None:
    agree(3, ("ddp", Complex), ("ddp", Rows))


def refusal(strategy: str, kind: type[nn.Module]) -> str:
    with pytest.raises(StrategyRefused) as error:
        trained(strategy, kind)
    return str(error.value)


def test_what_would_be_lost_on_the_way_is_refused() -> None:
    calls = (
        ("ddp,compress=bf16", Complex),
        ("server=1,compress=bf16", Complex),
        ("server=1", Complex),
        ("ddp,allreduce=ring", Rows),
    )
    for by_ddp, compressed, by_server, by_ring in world.run(2, in_turn, refusal, *calls):
        assert "wave is complex" in by_ddp
        assert "bf16 sends real numbers, and wave is complex" in compressed
        assert "wave is complex128" in by_server
        assert "table has sparse=True" in by_ring
