"""Values beside the batch that ranks do not share are told of: Python numbers, queues, NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.run import loop_watch, outside_values
from shoal.testing import world

Loop = Callable[[shoal.Run, nn.Module, torch.optim.Optimizer, DataLoader], object]


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (60,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=20)


def mean_read_in_the_loop(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    mean = 1.0
    for x, y in loader:
        run.forward_backward(lambda x, y, mean=mean: F.cross_entropy(model(x), y) / mean, x, y)
        mean = 0.9 * mean + 0.1 * float(x.std())
        optimizer.step()


def mean_kept_by_an_object(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    class Loss:
        mean = 1.0

        def __call__(self, x: Tensor, y: Tensor) -> Tensor:
            losses = F.cross_entropy(model(x), y, reduction="none")
            loss = (losses / self.mean).mean()
            self.mean = 0.9 * self.mean + 0.1 * losses.mean().item()
            return loss

    compute_loss = Loss()
    for x, y in loader:
        run.forward_backward(compute_loss, x, y)
        optimizer.step()


def queue_of_outputs(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    queue = torch.ones(4, 3, dtype=torch.float64)

    def compute_loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(x)
        against = (scores @ queue.T).logsumexp(1)
        return (F.cross_entropy(scores, y, reduction="none") + against).mean(), scores.detach()

    for x, y in loader:
        _, scores = run.forward_backward(compute_loss, x, y)
        queue = torch.cat([scores, queue])[:4]
        optimizer.step()


def count_of_positives(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for x, y in loader:
        count = int((y == 1).sum()) + 20
        run.forward_backward(lambda x, y, n=count: F.cross_entropy(model(x), y) / n, x, y)
        optimizer.step()


OTHERS = [("zero3", 2), ("server=1", 1), ("zero1", 1)]
TOLD = (
    *(note.partition("{")[0] for note in (outside_values.IN_PASSES, outside_values.IN_LOOP)),
    loop_watch.LIFTED,
    "refused",
)
IN_LOSSES = [mean_read_in_the_loop, mean_kept_by_an_object, queue_of_outputs, count_of_positives]


def mean_of_the_batch_by_numpy(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for x, y in loader:
        mean = float(np.mean(x.numpy()))
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x - mean, y)
        optimizer.step()


def mean_tensor_by_numpy(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for x, y in loader:
        mean = torch.from_numpy(x.numpy().mean(0)) * 1.0
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x - mean, y)
        optimizer.step()


def samples_by_numpy(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for x, y in loader:
        rows = x.numpy()
        rows = torch.from_numpy((rows - rows.mean(0)) / rows.std(0)).contiguous()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), rows, y)
        optimizer.step()


def weights_by_python(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for x, y in loader:
        norms = x.norm(dim=1).tolist()
        weights = torch.tensor([norm / max(norms) for norm in norms], dtype=torch.float64)
        run.forward_backward(
            lambda x, y: (F.one_hot(y, 3) * model(x)).mean(), x * weights[:, None], y
        )
        optimizer.step()


def shared_values(
    run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    """Compute with numbers that are the same everywhere, and with those of each sample."""
    mean, scale, table = 1.0, torch.tensor(0.5).double(), torch.eye(3).double()
    hidden = torch.zeros(10, 3).double()
    for x, y in loader:
        x = (x - 0.1 - mean) / torch.from_numpy(np.full(6, 2.0))

        def compute_loss(x: Tensor, y: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            scores = model(x) * scale / mean + 0.1 * hidden  # noqa: B023 (called in this turn)
            rows = [scores[i] / (1 + int(y[i])) for i in range(len(x))]
            return F.cross_entropy(torch.stack(rows) @ table.T, y), scores.detach()

        loss, hidden = run.forward_backward(compute_loss, x, y, hidden)
        mean = 0.9 * mean + 0.1 * loss.item()
        optimizer.step()
        optimizer.zero_grad()


def told(strategy: str, accumulate: int, loops: list[Loop]) -> list[list[str]]:
    """Return the notes about values that each loop has led to."""
    found = []
    for loop in loops:
        lines: list[str] = []
        run = shoal.init(strategy, accumulate=accumulate, announce=lines.append)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            loop(run, *run.prepare(model, optimizer, data()))
        except UsageError as error:
            lines.append(f"refused: {error}")
        found.append([line for line in lines if line.startswith(TOLD)])
    return found


LAYOUTS = [("ddp", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]


@pytest.mark.parametrize(("strategy", "accumulate"), LAYOUTS)
def test_values_of_earlier_batches_that_ranks_do_not_share_are_told(
    strategy: str, accumulate: int
) -> None:
    notes, _ = world.run(2, told, strategy, accumulate, IN_LOSSES)
    for loop, lines in zip(IN_LOSSES, notes, strict=True):
        assert len(lines) == 1, loop
        assert "value that is not the same in all passes of a step: " in lines[0], loop
        assert " at test_outside_values.py:" in lines[0], loop


@pytest.mark.parametrize(("strategy", "accumulate"), LAYOUTS)
def test_numbers_from_numpy_by_which_a_loop_computes_samples_are_told(
    strategy: str, accumulate: int
) -> None:
    loops = [mean_of_the_batch_by_numpy, mean_tensor_by_numpy]
    notes, _ = world.run(2, told, strategy, accumulate, loops)
    for lines in notes:
        assert len(lines) == 1
        assert lines[0].startswith("note: the loop computes samples with a value that is not the")


@pytest.mark.parametrize(("strategy", "accumulate"), LAYOUTS)
def test_samples_from_numpy_or_python_are_told_once(strategy: str, accumulate: int) -> None:
    loops = [samples_by_numpy, weights_by_python]
    notes, _ = world.run(2, told, strategy, accumulate, loops)
    assert notes == [[loop_watch.LIFTED]] * 2


@pytest.mark.parametrize(("strategy", "accumulate"), LAYOUTS)
def test_values_that_all_ranks_share_or_that_belong_to_a_sample_are_no_matter(
    strategy: str, accumulate: int
) -> None:
    assert world.run(2, told, strategy, accumulate, [shared_values]) == [[[]]] * 2


def test_one_device_shares_its_values_with_nobody() -> None:
    assert told("ddp", 1, [*IN_LOSSES, samples_by_numpy]) == [[]] * 5
