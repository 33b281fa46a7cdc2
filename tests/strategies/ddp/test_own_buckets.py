"""A small model's gradients are sent in buckets of our own, after the backward pass."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.comm.axis import Axis
from shoal.comm.deterministic import rank_order_mean
from shoal.run.supervised import supervised
from shoal.strategies.base import COUNT, LOSS_SUM, LocalBatch, Step
from shoal.strategies.ddp.own_buckets import OwnBuckets, bucketize_backward
from shoal.strategies.ddp.reduce_functions import RankOrderMean
from shoal.strategies.single import single_device
from shoal.testing import world
from shoal.verification import verify_job
from tests.harness.in_turn import in_turn
from tests.matrix.cases import EXPERIMENTS

SMALL_BUCKETS = "ddp,bucket_mb=0.001"


class Picky(nn.Module):
    """A model in which each rank uses a layer of its own, and no rank the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.nobodys = nn.ModuleList(nn.Linear(5, 2) for _ in range(3)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.each[dist.get_rank()](x)
        return found


def _model(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a model in float32, where the order of a sum shows, and this rank's batch."""
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1 + dist.get_rank())
    if kind == "picky":
        return Picky(), torch.randn(6, 5, generator=made)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), torch.randn(
        6, 3, 5, 5, generator=made
    )


def _steps_by_hand(kind: str) -> None:
    """Compute two steps, of several buckets each."""
    model, x = _model(kind)
    y, ranks = torch.arange(6) % 2, dist.get_world_size()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    expected: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        used = torch.tensor(float(parameter.grad is not None))
        average = rank_order_mean(
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        )
        dist.all_reduce(used)
        expected[name] = average if used else None
    part = single_device(model)
    axis = Axis(dist.get_rank(), ranks, torch.device("cpu"))
    buckets = bucketize_backward(part.trainable_params, bucket_mb=0.0005)
    reducer = OwnBuckets(part, axis, buckets, RankOrderMean(axis), overlaps=False)
    for _ in range(2):
        model.zero_grad()
        step = Step(supervised(F.cross_entropy, model), 6 * ranks)
        batch = LocalBatch(step, (x, y), {}, 6)
        totals = reducer.forward_backward(reducer.forward, batch).step_totals
    losses = [torch.zeros(()) for _ in range(ranks)]
    dist.all_gather(losses, loss.detach())
    assert totals[LOSS_SUM].item() == pytest.approx(6 * torch.stack(losses).sum().item(), rel=1e-6)
    assert totals[COUNT] == 6 * ranks
    assert totals.untyped_storage().nbytes() == totals.nbytes  # and hold no gradients
    for name, parameter in model.named_parameters():
        gradient, mean = parameter.grad, expected[name]
        assert (gradient is None) == (mean is None) == name.startswith("nobodys"), name
        if gradient is not None and mean is not None:
            assert torch.equal(gradient, mean), name
            assert gradient.stride() == parameter.stride(), name


def test_gradients_are_the_means_in_the_order_of_ranks_to_the_last_bit() -> None:
    world.run(3, in_turn, _steps_by_hand, ("picky",), ("channels last",))


def _uses_torchs_engine(strategy: str) -> bool:
    run, model = shoal.init(strategy, announce=lambda _: None), nn.Linear(40, 30)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.forward_backward(
        supervised(F.cross_entropy, model), torch.ones(2, 40), torch.tensor([0, 1])
    )
    return any(type(found) is DistributedDataParallel for found in gc.get_objects())


def test_only_what_is_larger_than_a_bucket_is_sent_beside_the_backward_pass() -> None:
    found = world.run(2, in_turn, _uses_torchs_engine, ("ddp",), (SMALL_BUCKETS,))
    assert found == [[False, True]] * 2


@pytest.mark.parametrize(
    ("name", "ranks", "accumulate"),
    [
        ("unused, frozen, shared and scalar parameters", 2, 2),
        pytest.param("lstm", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_both_ways_train_as_one_process_does(name: str, ranks: int, accumulate: int) -> None:
    for strategy in ("ddp", SMALL_BUCKETS):
        verdict = verify_job(EXPERIMENTS[name], strategy, ranks, accumulate=accumulate)
        assert verdict.verdict == "exact", verdict
