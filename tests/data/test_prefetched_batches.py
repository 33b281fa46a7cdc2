"""A loop may fetch batches before it computes on them; each is weighed as itself, or refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world

Batches = Callable[[Any], Iterator[Any]]


def in_turn(loader: Any) -> Iterator[Any]:
    yield from loader


def all_at_once(loader: Any) -> Iterator[Any]:
    yield from list(loader)


def one_ahead(loader: Any) -> Iterator[Any]:
    coming: list[Any] = []
    for batch in loader:
        coming.append(batch)
        if len(coming) == 2:
            yield coming.pop(0)
    yield from coming


def flattened_ahead(loader: Any) -> Iterator[Any]:
    for x, y in list(loader):
        yield x.view(len(x), 4), y.view(-1)


def copied_ahead(loader: Any) -> Iterator[Any]:
    """As `x.cuda()` makes them: nothing of what was yielded is left."""
    for x, y in one_ahead(loader):
        yield x.clone(), y.clone()


def copied_in_turn(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        yield x.clone(), y.clone()


def prepared(samples: int, batch_size: int) -> tuple[shoal.Run, nn.Module, Any]:
    torch.manual_seed(0)
    run, model = shoal.init(announce=lambda _: None), nn.Linear(4, 3).double()
    data = TensorDataset(torch.randn(samples, 4).double(), torch.randint(0, 3, (samples,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))
    return run, model, loader


def losses(batches: Batches, samples: int = 11) -> list[float]:
    """Of batches of 8 samples, over two epochs."""
    run, model, loader = prepared(samples, 8)
    found = []
    for _ in range(2):
        for x, y in batches(loader):
            model.zero_grad()
            found.append(run.forward_backward(supervised(F.cross_entropy, model), x, y).item())
            assert model.weight.grad is not None
            found.append(model.weight.grad.norm().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches", [in_turn, copied_in_turn, one_ahead, all_at_once, flattened_ahead]
)
def test_each_batch_is_weighed_as_itself(batches: Batches) -> None:
    expected = losses(in_turn)
    for found in world.run(2, losses, batches) + world.run(3, losses, batches):
        assert found == pytest.approx(expected, rel=1e-12)


def test_batches_that_nobody_can_tell_apart_are_refused_where_they_differ_in_size() -> None:
    message = r"shape \(4, 4\); the loader's last share has [12] samples.*run\.to_device"
    with pytest.raises(LaunchError, match=message):
        world.run(2, losses, copied_ahead)


def test_batches_that_nobody_can_tell_apart_are_fine_where_all_have_one_size() -> None:
    expected = losses(in_turn, 16)
    for found in world.run(2, losses, copied_ahead, 16):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_batch_that_is_none_of_the_loaders_is_refused() -> None:
    run, model, loader = prepared(10, 7)
    _ = list(loader)
    with pytest.raises(UsageError, match=r"shape \(7, 4\); the loader's last share has 3 samples"):
        run.forward_backward(
            supervised(F.cross_entropy, model),
            torch.zeros(7, 4).double(),
            torch.zeros(7, dtype=torch.int64),
        )


def test_a_part_of_a_batch_is_refused() -> None:
    run, model, loader = prepared(8, 6)
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"shape \(3, 4\); the loader's last share has 6 samples"):
        run.forward_backward(supervised(F.cross_entropy, model), x[:3], y[:3])


def test_tensors_of_two_batches_in_one_call_are_refused() -> None:
    run, model, loader = prepared(10, 7)
    (x, _), (_, y) = list(loader)
    words = "tensors of batches of 7 and 3 samples at once.*use ddp there"
    with pytest.raises(UsageError, match=words):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


def test_samples_flattened_to_several_rows_each_are_known_by_their_layout() -> None:
    """Copies, so that only their shape can tell; the last batch is smaller."""
    torch.manual_seed(0)
    run, model = shoal.init(announce=lambda _: None), nn.Linear(4, 3)
    data = TensorDataset(torch.randn(6, 5, 4), torch.randint(0, 3, (6, 5)))
    _, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4)
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(
                supervised(tokens, model), x.flatten(0, 1).clone(), y.flatten().clone()
            )
    (x, y), _ = list(loader)
    with pytest.raises(UsageError, match=r"shape \(20, 4\); the loader's last share has 2 samples"):
        run.forward_backward(
            supervised(tokens, model), x.flatten(0, 1).clone(), y.flatten().clone()
        )


def test_a_layout_that_was_fine_while_all_shares_had_one_size_is_refused_when_they_have_two() -> (
    None
):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    run, model = shoal.init(announce=lambda _: None), nn.Linear(4, 3)
    data = TensorDataset(torch.randn(6, 5, 4), torch.randint(0, 3, (6, 5)))
    _, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4)
    )
    epoch = iter(loader)
    x, y = next(epoch)
    run.forward_backward(supervised(loss, model), x.clone(), y.clone())
    flattened = x.flatten(0, 1).clone(), y.flatten().clone()
    run.forward_backward(supervised(loss, model), *flattened)
    assert [len(smaller) for smaller, _ in epoch] == [2]
    next(iter(loader))
    with pytest.raises(UsageError, match=r"shape \(20, 4\); the loader's last share has 4 samples"):
        run.forward_backward(supervised(loss, model), *flattened)
