"""Loops that mix the samples of a rank before `forward_backward` are refused, others are not."""

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.errors import UsageError
from shoal.platform.torch_private.subclasses import has_dispatch_modes
from shoal.run import loop_watch
from shoal.testing import world
from tests.harness.in_turn import in_turn

Loop = Callable[[shoal.Run, nn.Module, Tensor, Tensor], tuple[Tensor, ...]]


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(36, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (36,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=12)


def mixup(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    partner = torch.randperm(len(x))
    hot = F.one_hot(y, 3).double()
    return 0.7 * x + 0.3 * x[partner], 0.7 * hot + 0.3 * hot[partner]


def flipped_in_place(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.mul_(0.7).add_(x.flip(0), alpha=0.3)
    return x, F.one_hot(y, 3).double()


def normalised(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    gain = x[:, 0]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    return x, F.one_hot(y, 3) * gain[:, None]


def normalised_by_numbers(
    run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    return (x - x.mean().item()) / x.std().item(), F.one_hot(y, 3).double()


def partners(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.cat([x, x.roll(1, 0)], 1)[:, 3:9], F.one_hot(y, 3).double()


def centred_outputs(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        scores = model(x)
    return x, (scores - scores.mean(0)).softmax(1)


def swapped_in_a_buffer(
    run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    half, other = len(x) // 2, torch.empty_like(x)
    other[:half] = x[half:]
    other[half:] = x[:half]
    return 0.7 * x + 0.3 * other, F.one_hot(y, 3).double()


MIXING: list[Loop] = [
    mixup,
    swapped_in_a_buffer,
    flipped_in_place,
    normalised,
    normalised_by_numbers,
    partners,
    centred_outputs,
]


def augmented(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x = (x.to(run.device).float().double() - 0.1) / 2.0
    x = torch.where(torch.rand(len(x), 1) < 0.5, x, -x) + 0.1 * torch.randn_like(x)
    x = F.dropout(x, 0.2).reshape(len(x), 2, 3).transpose(1, 2).contiguous().flatten(1)
    for row in range(len(x)):
        x[row].roll(random.randrange(3))
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return (x + 0.01 * slope.sign()).detach(), F.one_hot(y, 3).double()


def sorted_rows(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    order = x[:, 0].argsort()
    return x[order], F.one_hot(y, 3).double()[order]


def shuffled_together(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    order = torch.randperm(len(x))
    return x[order], F.one_hot(y[order], 3).double()


def gathered(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    everyone = run.gather(x)
    return (x - everyone.mean(0)) / everyone.std(0), F.one_hot(y, 3).double()


def gathered_partners(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    hot = F.one_hot(y, 3).double()
    everyone, labels = run.gather(x), run.gather(hot)
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(3))
    other, label = everyone[order][run.rows], labels[order][run.rows]
    return 0.7 * x + 0.3 * other, 0.7 * hot + 0.3 * label


def mean_of_all_ranks(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mean = x.mean(0)
    torch.distributed.all_reduce(mean)
    own = shoal.allreduce(x.mean(0))
    return x - mean / run.world_size + own, F.one_hot(y, 3).double()


NOT_MIXING: list[Loop] = [augmented, sorted_rows, shuffled_together, gathered, gathered_partners]


def other_loops() -> list[str]:
    """Return what is said about loops of other forms."""
    numbers = [in_one_number(), number_around()]
    return [fetching_ahead(), reading_around(), sharing(), *numbers, below_another_mode()]


def start(lines: list[str]) -> tuple[shoal.Run, nn.Module, DataLoader]:
    run = shoal.init("ddp", announce=lines.append)
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, data())
    return run, model, loader


def error_of(step: Callable[[], object]) -> str:
    try:
        step()
    except UsageError as error:
        return str(error)
    return ""


def fetching_ahead() -> str:
    run, model, loader = start([])
    pairs = pairwise(x - x.mean(0) for x, _ in loader)
    return error_of(lambda: [run.forward_backward(lambda x: model(x).mean(), x) for x, _ in pairs])


def reading_around() -> str:
    run, model, loader = start([])
    x, y = next(iter(loader))
    y = y.double() / y.double().norm()
    return error_of(lambda: run.forward_backward(lambda x: (model(x)[:, 0] * y).mean(), x))


def sharing() -> str:
    run, model, _ = start([])
    x = run.share(torch.arange(72.0).double().view(12, 6))
    x = x / x.amax()
    return error_of(lambda: run.forward_backward(lambda x: model(x).mean(), x))


def in_one_number() -> str:
    lines: list[str] = []
    run, model, loader = start(lines)
    for x, _ in loader:
        rate = x.std()
        run.forward_backward(lambda x, rate: (model(x) / rate).mean(), x, rate)
    return " ".join(line for line in lines if line == loop_watch.ONE_NUMBER)


def number_around() -> str:
    """Take a number of the loop's by the closure of the loss."""
    lines: list[str] = []
    run, model, loader = start(lines)
    for x, _ in loader:
        scale = x.abs().max()
        run.forward_backward(lambda x: (model(x) / scale).mean(), x)  # noqa: B023 - called at once
    return " ".join(line for line in lines if line == loop_watch.ONE_NUMBER)


def below_another_mode() -> str:
    run, model, loader = start([])
    batches = iter(loader)
    x, _ = next(batches)
    with FlopCounterMode(display=False):
        x = x - x.mean(0)
        error = error_of(lambda: run.forward_backward(lambda x: model(x).mean(), x))
    assert not has_dispatch_modes()
    return error


def told(strategy: str, loops: list[Loop], reduction: str = "rows") -> list[str | list[float]]:
    """Return the error of each loop, or its losses."""
    return [result_of(strategy, loop, reduction) for loop in loops]


def result_of(strategy: str, loop: Loop, reduction: str) -> str | list[float]:
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, data())

    def compute_loss(x: Tensor, target: Tensor) -> Tensor:
        return -(target * F.log_softmax(model(x), 1)).sum(1).mean()

    losses = []
    try:
        for x, y in loader:
            optimizer.zero_grad()
            batch = loop(run, model, x, y)
            loss = run.forward_backward(compute_loss, *batch, reduction=reduction)
            losses.append(loss.item())
            optimizer.step()
    except UsageError as error:
        return str(error)
    return losses


def mixed(call: str, place: str = "") -> str:
    return loop_watch.MIXED.format(call=call, place=place)


LossOfLoop = Callable[[shoal.Run, Tensor, Tensor], Tensor]


def sharpened_over_the_batch(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    q = scores.softmax(1)
    target = q.square() / q.sum(0)
    target = (target / target.sum(1, keepdim=True)).detach()
    return F.kl_div(q.log(), target, reduction="batchmean")


def weighted_by_the_counts_of_a_batch(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    weight = len(y) / torch.bincount(y, minlength=3).clamp(min=1).double()
    return (F.cross_entropy(scores, y, weight=weight, reduction="none")).mean()


def balanced_by_positives(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    positive = F.one_hot(y, 3).double()
    share = positive[:, 0].mean()
    weight = torch.where(positive == 1, 1 - share, share)
    return F.binary_cross_entropy_with_logits(scores, positive, weight=weight)


def normalised_rewards(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    reward = (y == scores.argmax(1)).double() + y
    reward = (reward - reward.mean()) / 2
    return -(F.log_softmax(scores, 1)[:, 0] * reward).mean()


def balanced_codes(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        codes = (scores / 0.1).softmax(0)
        codes /= codes.sum(1, keepdim=True)
    return -(codes * F.log_softmax(scores, 1)).sum(1).mean()


def of_the_hardest_by_number(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(scores, y, reduction="none")
    _, order = torch.sort(losses, descending=True)
    return losses[order[:4]].mean()


def against_the_targets_of_others(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    targets = F.one_hot(y, 3).double() + torch.arange(3)
    return F.cross_entropy(scores @ targets.T, torch.arange(len(scores)))


def to_the_nearest_target(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(scores, F.one_hot(y, 3).double()).amin(1).mean()


MIXING_LOSSES: list[LossOfLoop] = [
    against_the_targets_of_others,
    to_the_nearest_target,
    of_the_hardest_by_number,
    sharpened_over_the_batch,
    weighted_by_the_counts_of_a_batch,
    balanced_by_positives,
    normalised_rewards,
    balanced_codes,
]


def focal(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    log_p = F.log_softmax(scores, 1).gather(1, y[:, None])[:, 0]
    return -((1 - log_p.detach().exp()).square() * log_p).mean()


def weighted_by_a_table(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return (table[y] * F.cross_entropy(scores, y, reduction="none")).mean()


def of_chosen_rows(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    """Take some rows twice, others not, and as many as there are samples."""
    chosen = (torch.arange(len(y)) // 2).flip(0)
    target = F.one_hot(y, 3).double()[chosen]
    found = (scores.detach().argmax(1) >= 0).nonzero()[:, 0]
    errors = (scores[chosen] - target).square() + (scores - scores.detach()[found]).square()
    return errors.sum() / len(y)


def in_another_order(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    order = y.argsort(descending=True)
    hot = F.one_hot(y[order], 3).double()
    return F.cross_entropy(scores[order], hot * (1 + scores.detach()[order].sigmoid()))


def sharpened_over_all(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    q = scores.softmax(1)
    target = q.square() / run.gather(q.detach()).sum(0)
    return F.kl_div(q.log(), (target / target.sum(1, keepdim=True)).detach(), reduction="batchmean")


def against_the_targets_of_all(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    targets = run.gather(F.one_hot(y, 3).double() + torch.arange(3))
    return F.cross_entropy(scores @ targets.T, torch.arange(len(targets))[run.rows])


def with_its_own_target_among_pairs(run: shoal.Run, scores: Tensor, y: Tensor) -> Tensor:
    """Compare all samples too, for a figure that is printed."""
    likeness = scores @ F.one_hot(y, 3).double().T
    assert likeness.softmax(1).amax() <= 1
    return -likeness.diagonal().mean()


OTHER_LOSSES: list[LossOfLoop] = [
    against_the_targets_of_all,
    with_its_own_target_among_pairs,
    focal,
    weighted_by_a_table,
    of_chosen_rows,
    in_another_order,
    sharpened_over_all,
]


def errors_of_losses(strategy: str, losses: list[LossOfLoop]) -> list[str]:
    """Return the error of a loop with each loss; "" without one."""
    return [error_of(lambda loss=loss: train_loss(strategy, loss)) for loss in losses]


def train_loss(strategy: str, loss: LossOfLoop) -> None:
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, data())
    for step, (x, y) in enumerate(loader):
        if step == 1:  # samples lie elsewhere in the outputs than in the batch
            x, y = x.t().flip(1).contiguous().t(), y.flip(0)
        optimizer.zero_grad()
        run.backward(loss(run, model(x), y))
        optimizer.step()


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero3", "server=1"))]
)
def test_targets_and_weights_that_a_loss_computes_from_other_samples_are_refused(
    strategy: str,
) -> None:
    for found in world.run(2, errors_of_losses, strategy, MIXING_LOSSES):
        for error, loss in zip(found, MIXING_LOSSES, strict=True):
            if loss is weighted_by_the_counts_of_a_batch:  # the graph of the loss has the weights
                assert "each rank multiplies a term (mean) by another number" in error
                continue
            assert error.startswith("backward was given samples that the loop"), loss.__name__
            assert "of this rank (test_loop_watch.py:" in error


@pytest.mark.slow
def test_targets_and_weights_of_each_sample_or_of_all_ranks_are_not() -> None:
    for found in world.run(2, errors_of_losses, "ddp", OTHER_LOSSES):
        assert found == [""] * len(OTHER_LOSSES)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero3", "server=1"))]
)
def test_loops_that_mix_the_samples_of_a_rank_are_refused(strategy: str) -> None:
    for found in world.run(2, told, strategy, MIXING):
        assert found == [mixed("forward_backward")] * len(MIXING)


@pytest.mark.slow
def test_loops_that_mix_the_samples_of_a_rank_on_purpose_go_on() -> None:
    for found in world.run(2, told, "ddp", MIXING, "ranks"):
        assert all(isinstance(losses, list) for losses in found)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero3", "server=1"))]
)
def test_loops_that_compute_each_sample_from_itself_or_from_all_ranks_go_on(strategy: str) -> None:
    loops = NOT_MIXING if strategy.startswith("server") else [*NOT_MIXING, mean_of_all_ranks]
    for found in world.run(2, told, strategy, loops):
        assert all(isinstance(losses, list) for losses in found)


@pytest.mark.slow
def test_gathered_samples_give_the_numbers_of_one_device() -> None:
    loops = [gathered, gathered_partners, sorted_rows]
    expected = told("ddp", loops)
    for found in world.run(2, told, "ddp", loops):
        for losses, right in zip(found, expected, strict=True):
            assert losses == pytest.approx(right, rel=1e-10)


def notes_of_draws() -> list[list[str]]:
    """Return the notes about draws of loops that draw noise, by a generator of their own or not."""
    found = []
    for own in (None, torch.Generator().manual_seed(1)):
        lines: list[str] = []
        run, model, loader = start(lines)
        for x, _ in loader:
            z = torch.randn(len(x), 6, generator=own, dtype=torch.float64)
            run.forward_backward(lambda x, z, m=model: (m(x) * m(z)).mean(), x, z)
        found.append([line for line in lines if "draws" in line])
    return found


def notes_of_draws_for_all() -> list[str]:
    """Return the notes about draws of mixup with partners from all ranks."""
    lines: list[str] = []
    run, model, loader = start(lines)
    generator = torch.Generator().manual_seed(1)
    for x, _ in loader:
        everyone = run.gather(x)
        order = torch.randperm(len(everyone), generator=generator)
        strength = torch.rand(1, generator=generator).item()
        mixed = x + strength * everyone[order][run.rows]
        run.forward_backward(lambda x, m=model: m(x).mean(), mixed)
    return [line for line in lines if "draws" in line]


OWN_NUMPY = np.random.default_rng(0)
OWN_PYTHON = random.Random(0)


def notes_of_host_draws(by_function: bool) -> list[list[str]]:
    """Return the notes about draws by Python and NumPy: four for each sample, one for the batch."""
    found = []
    for draw in (
        lambda x: torch.stack([row if random.random() < 0.5 else -row for row in x]),
        lambda x: torch.stack([row * np.random.rand() for row in x]),
        lambda x: x + torch.from_numpy(OWN_NUMPY.normal(size=(len(x), 6))),
        lambda x: torch.stack([row * OWN_PYTHON.random() for row in x]),
        lambda x: x if random.random() + OWN_NUMPY.random() < 0.5 + OWN_PYTHON.random() else -x,
    ):
        lines: list[str] = []
        run, model, loader = start(lines)
        for x, _ in track(loader, disable=True):  # as many loops with a bar
            if by_function:
                run.forward_backward(lambda x, m=model: m(x).mean(), draw(x))
            else:
                run.backward(model(draw(x)).mean())
        found.append([line for line in lines if "draws" in line])
    return found


def fetched_ahead() -> list[str]:
    """Return the notes about draws of a data set that draws for each sample."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, DataLoader(Noisy(), batch_size=12))
    for x, _ in pairwise(loader):
        run.forward_backward(lambda x: model(x).mean(), x)
    return [line for line in lines if "draws" in line]


class Noisy(Dataset):
    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(6, dtype=torch.float64)


def test_random_numbers_that_a_loop_draws_by_torch_are_told_once() -> None:
    told, by_own = world.run(2, notes_of_draws)[0]
    assert len(told) == len(by_own) == 1
    assert told[0].startswith(
        "note: the loop draws random numbers by torch (randn at test_loop_watch.py:"
    )
    assert by_own[0].startswith(
        "note: the loop draws random numbers by a torch.Generator of its own (randn at test_loop_"
    )
    assert "All ranks draw the same ones" in by_own[0]


def test_numbers_that_the_loop_draws_for_the_whole_batch_by_a_generator_of_its_own_are_not() -> (
    None
):
    assert world.run(2, notes_of_draws_for_all) == [[], []]


@pytest.mark.parametrize("by_function", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_numbers_that_a_loop_draws_for_each_sample_by_python_or_numpy_are_told_once(
    by_function: bool,
) -> None:
    *for_each, for_the_batch = world.run(2, notes_of_host_draws, by_function)[0]
    kinds = ("Python", "NumPy", "a numpy.random.Generator of its own", "a random.Random of its own")
    for lines, kind in zip(for_each, kinds, strict=True):
        (line,) = lines
        assert line.startswith(f"note: the loop draws random numbers by {kind}, at least")
    assert for_the_batch == []


def test_those_of_a_data_set_that_a_loop_fetches_ahead_are_not() -> None:
    assert world.run(2, fetched_ahead) == [[], []]


def test_loops_of_other_forms_are_watched_too() -> None:
    for said in world.run(2, other_loops)[:1]:
        mixed_rows = mixed("forward_backward")
        number = loop_watch.ONE_NUMBER
        assert said == [mixed_rows, mixed_rows, mixed_rows, number, number, mixed_rows]


def notes_on_tables(of_all: bool) -> list[str]:
    """Compare outputs with a bank of earlier ones, and count hits. Returns the notes on tables."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, data())
    bank, hits = torch.eye(3).double().repeat(5, 1), torch.zeros(3, 3).double()
    for _ in range(3):
        for x, y in loader:
            output = model(x)
            hits = hits + F.one_hot(y, 3).double().T @ output.detach()
            run.backward(F.cross_entropy(output @ bank.T, y))
            optimizer.step()
            rows = run.gather(output.detach()) if of_all else output.detach()
            bank = torch.cat([rows[:1], bank[:-1]])
    return [line for line in lines if "in which ranks differ" in line]


def test_a_bank_of_a_rank_s_own_outputs_is_told_once_and_one_of_all_outputs_is_not() -> None:
    of_own, of_all = world.run(2, in_turn, notes_on_tables, (False,), (True,))[0]
    assert len(of_own) == 1
    assert "a tensor of shape (3, 15) at test_loop_watch.py:" in of_own[0]
    assert of_all == []


Constant = Callable[[shoal.Run, Tensor, Tensor, dict[str, Tensor]], Tensor]


def queue_before_the_step(
    run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]
) -> Tensor:
    logits = scores @ kept["queue"].clone()  # (3, 7)
    kept["queue"] = torch.cat([scores.detach().T, kept["queue"]], 1)[:, :7]
    return F.cross_entropy(logits, y)


def share_of_each_class(
    run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]
) -> Tensor:
    share = torch.bincount(y, minlength=3).double() / len(y)
    return F.cross_entropy(scores + share.clamp(min=1e-3).log(), y)


def count_of_each_class(
    run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]
) -> Tensor:
    sums = torch.zeros(7).double().index_add(0, y, F.cross_entropy(scores, y, reduction="none"))
    return (sums / torch.bincount(y, minlength=7).clamp(min=1)).mean()


def inverse_of_a_sum(run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)[y]
    losses = F.cross_entropy(scores, y, reduction="none")
    return (losses * weight * (1 / weight.sum())).sum()


def history_of_each_sample(
    run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]
) -> Tensor:
    number = y + 3 * torch.arange(len(y))
    losses = F.cross_entropy(scores, y, reduction="none")
    loss = (losses * (1 + kept["history"][number])).mean()
    kept["history"][number] = losses.detach()
    return loss


def queue_of_all(run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    logits = scores @ kept["queue"].clone()
    kept["queue"] = torch.cat([run.gather(scores.detach()).T, kept["queue"]], 1)[:, :7]
    return F.cross_entropy(logits, y)


def table_of_all(run: shoal.Run, scores: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return (scores - kept["table"][y]).square().mean()


def notes_on_constants(constant: Constant, batch_size: int) -> list[str]:
    """Return the notes on tables of a loop over batches of so many samples."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    kept = {
        "queue": torch.ones(3, 7).double(),
        "history": torch.zeros(99).double(),
        "table": torch.randn(3, 3).double(),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = data().dataset
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(dataset, batch_size))
    for x, y in loader:
        loss = constant(run, model(x), y, kept)
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()
    return [line for line in lines if "in which ranks differ" in line]


def test_constants_of_a_loss_that_each_rank_has_of_its_own_samples_are_told() -> None:
    """One of the queues has as many features as a rank has samples."""
    own: list[tuple[Constant, int, str]] = [
        (queue_before_the_step, 6, "(3, 7)"),
        (queue_before_the_step, 8, "(3, 7)"),
        (share_of_each_class, 8, "(3,)"),
        (count_of_each_class, 12, "(7,)"),
        (inverse_of_a_sum, 8, "()"),
        (history_of_each_sample, 8, "(99,)"),
    ]
    found = world.run(2, in_turn, notes_on_constants, *((each[:2]) for each in own))[0]
    for notes, (constant, _, shape) in zip(found, own, strict=True):
        assert len(notes) == 1, constant.__name__
        assert f"a tensor of shape {shape} at test_loop_watch.py:" in notes[0]


def test_constants_that_all_ranks_have_are_not() -> None:
    found = world.run(2, in_turn, notes_on_constants, (queue_of_all, 6), (table_of_all, 8))[0]
    assert found == [[], []]


def branches(of_all: bool) -> tuple[Tensor, list[str]]:
    """Add a term to the loss of a batch whose mean is above 0. Returns weights and notes."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    torch.manual_seed(0)
    model, extra = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    model, extra, optimizer, loader = run.prepare(model, extra, optimizer, data())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        answer = x.mean() > 0
        if shoal.all_reduce(answer.float(), op="max") > 0 if of_all else answer:
            loss = loss + F.cross_entropy(extra(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return run.weights()["model0.weight"], [line for line in lines if "another branch" in line]


def test_a_branch_on_a_rank_s_own_samples_is_told_once_and_one_on_all_is_exact() -> None:
    whole, untold = world.run(1, branches, False)[0]
    (_, own), (weights, of_all) = world.run(2, in_turn, branches, (False,), (True,))[0]
    assert len(own) == 1
    assert "(test_loop_watch.py:" in own[0]
    assert untold == of_all == []
    assert_close(weights, whole, rtol=0, atol=1e-12)


def notes_on_figures(takes: str) -> list[str]:
    """Evaluate by hand before each step, and return the notes on figures."""
    notes: list[str] = []
    run = shoal.init("ddp", announce=notes.append)
    torch.manual_seed(1)
    model = nn.Linear(6, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    batches = list(data())
    for number, batch in enumerate(batches):
        with torch.no_grad():
            loss = compute_loss(*run.share(batches[number - 1]))
            if takes == "all":
                loss = run.gather(loss[None]).mean()
            assert loss.item() if takes != "none" else loss.ndim == 0
        optimizer.zero_grad()
        returned = run.forward_backward(compute_loss, *run.share(batch))
        assert returned.item() > 0
        optimizer.step()
    return [note for note in notes if "a number that the loop reads" in note]


def test_a_figure_that_the_loop_computes_by_itself_is_noted_with_its_line() -> None:
    own, of_all, none = world.run(
        2, in_turn, notes_on_figures, *((takes,) for takes in ("own", "all", "none"))
    )[0]
    assert len(own) == 1
    assert "(test_loop_watch.py:" in own[0]
    assert [of_all, none] == [[], []]
