"""Local SGD and DiLoCo: exact at H = 1, DiLoCo by its formula, no messages between sync rounds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS, images

QUIET = {"announce": lambda _: None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "accumulate"),
    [("cnn", 3, 1), ("unused, frozen, shared and scalar parameters", 3, 2)],
)
def test_with_a_meeting_after_every_step_it_is_ddp(name: str, ranks: int, accumulate: int) -> None:
    verdict = verify_job(EXPERIMENTS[name], "local=1", ranks, accumulate=accumulate)
    assert verdict.verdict == "exact", verdict


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco=3",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("local=3", "recompute,local=2")),
    ],
)
def test_verify_says_by_design_and_why(strategy: str) -> None:
    verdict = verify_job(EXPERIMENTS["mlp"], strategy, 2)
    assert verdict.verdict == "differs by design"
    assert "every rank steps by its own samples" in verdict.reasons[0]


def test_alone_it_is_one_process() -> None:
    assert verify_job(EXPERIMENTS["mlp"], "local=3", 1).verdict == "exact"


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(12) if norm else nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), middle, nn.Linear(12, 10)).double()


def trained(strategy: str, norm: bool = False) -> dict[str, Tensor]:
    """Return the weights after 10 batches of 9 samples."""
    run, model = shoal.init(strategy, **QUIET), net(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.Subset(images(), range(27))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=9))
    steps = 0
    while steps < 10:
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(F.cross_entropy, model), x, y)
            optimizer.step()
            steps += 1
            if steps == 10:
                break
    return run.weights()


def by_hand(ranks: int, every: int, rate: float, momentum: float) -> dict[str, Tensor]:
    """Compute DiLoCo in one process, with a model for each rank and torch's SGD outside.

    The run ends with a sync round.
    """
    x, y = (tensor[:27] for tensor in images().tensors)
    models, outer = [net() for _ in range(ranks)], net()
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    outside = torch.optim.SGD(outer.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    for step in range(10):
        start = 9 * (step % 3)
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            rows = slice(start + 9 // ranks * rank, start + 9 // ranks * (rank + 1))
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        if (step + 1) % every == 0 or step == 9:
            for number, parameter in enumerate(outer.parameters()):
                now = [list(model.parameters())[number].detach() for model in models]
                parameter.grad = parameter.detach() - torch.stack(now).mean(0)
            outside.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    return dict(outer.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "every", "rate", "momentum"),
    [
        ("local=3", 3, 1.0, 0.0),
        ("diloco=4", 4, 0.7, 0.9),
        ("diloco=3,outer_lr=0.5,outer_momentum=0.5", 3, 0.5, 0.5),
    ],
)
def test_it_is_the_formula_worked_out_in_one_process(
    strategy: str, every: int, rate: float, momentum: float
) -> None:
    first, *others = world.run(3, trained, strategy)
    assert_same(first, by_hand(3, every, rate, momentum))
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_running_statistics_are_means_as_well() -> None:
    first, *others = world.run(3, trained, "local=4", True)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def observed(strategy: str) -> tuple[list[int], list[bool], list[bool]]:
    """Return for each step the number of collectives, and if stops and weights are equal."""
    run, model = shoal.init(strategy, **QUIET), net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), batch_size=10)
    )
    counts: list[int] = []
    calls = {
        name: getattr(dist, name)
        for name in ("all_reduce", "broadcast", "all_to_all_single", "barrier")
    }

    def count(name: str) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            counts[-1] += 1
            return calls[name](*arguments, **options)

        return counted

    heard, agreed = [], []
    for name in calls:
        setattr(dist, name, count(name))
    for step in range(8):
        if step == 1 and run.rank == 1:
            run.request_stop()
        for x, y in loader:
            counts.append(0)
            optimizer.zero_grad()
            run.forward_backward(supervised(F.cross_entropy, model), x, y)
            optimizer.step()
            break
        heard.append(run.stopping())
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(run.world_size)]
        dist.all_gather(found, next(iter(model.parameters())).detach().sum().view(1))
        agreed.append(all(torch.equal(value, found[0]) for value in found))
    return counts, heard, agreed


def test_between_rounds_nothing_is_sent_and_a_stop_comes_at_the_next() -> None:
    for counts, heard, agreed in world.run(2, observed, "local=4"):
        assert [count > 0 for count in counts] == [False, False, False, True] * 2
        assert heard == [False, False, False, True] + [False, False, False, True]
        assert agreed == [False, False, False, True] * 2


def looked(strategy: str) -> list[bool]:
    """Return for each step if weights are equal. `weights()` is called before the third."""
    run, model = shoal.init(strategy, **QUIET), net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), batch_size=4)
    )
    agreed = []
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        if step == 2:
            run.weights()
        optimizer.step()
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(run.world_size)]
        dist.all_gather(found, next(iter(model.parameters())).detach().sum().view(1))
        agreed.append(all(torch.equal(value, found[0]) for value in found))
    return agreed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local=4", "diloco=4"])
def test_a_meeting_between_a_backward_pass_and_its_step_changes_no_other(strategy: str) -> None:
    for agreed in world.run(2, looked, strategy):
        assert agreed == [False, False, False, True] * 2


def asks() -> tuple[bool, bool, bool, str]:
    run, model = shoal.init("diloco=4", **QUIET), net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), batch_size=10)
    )
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    with pytest.raises(UsageError) as error:
        run.gradients()
    optimizer.step()
    first, second = run.synchronize(), run.synchronize()
    return run.is_synchronous, first, second, str(error.value)


def test_ranks_agree_before_their_time_where_one_model_is_wanted() -> None:
    for in_step, first, second, words in world.run(2, asks):
        assert (in_step, first, second) == (False, True, False)
        assert "gradients of its own" in words


def refused(strategy: str, options: dict[str, Any]) -> None:
    run = shoal.init(strategy, **QUIET, **options)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)
    )
    data = torch.utils.data.TensorDataset(torch.ones(8, 64), torch.zeros(8, dtype=torch.int64))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8))


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("tensor=2,local=2", {}, "Use ddp"),
        ("local=2", {"precision": "fp16"}, "Use bf16"),
    ],
)
def test_what_it_cannot_do_is_said_before_the_run(
    strategy: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(LaunchError, match=words):
        world.run(2, refused, strategy, options)
