"""`run.backward(loss)` refuses outputs that a model, or a choice, takes from several samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


class NormOfBatch(nn.Module):
    """Normalises over the batch, by no layer that is known to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.batch_norm(self.body(x), None, None, training=True).tanh())


class NormLayer(nn.Module):
    """A layer that does so."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True).tanh()


class NormInMethod(nn.Module):
    """Has that layer between two others, or in a block."""

    def __init__(self, in_block: bool = False) -> None:
        super().__init__()
        layers = nn.Linear(5, 8), NormLayer()
        self.body = nn.Sequential(nn.Sequential(*layers)) if in_block else nn.Sequential(*layers)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def scores(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return self.head(x)


class Observed(NormOfBatch):
    """Rounds activations by the range that it has seen, as quantisation-aware training does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.largest.lerp_(hidden.detach().abs().max(), 0.5)
        scale = self.largest.clone() / 15
        return self.head(hidden + ((hidden / scale).round() * scale - hidden).detach())


class CountedIds(nn.Module):
    """Mixes in its backward pass alone: gradients are divided by how often an id comes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 4, scale_grad_by_freq=True), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long().clamp(max=2)).flatten(1))


class Balanced(NormOfBatch):
    """Two experts, and a number that says how unevenly they are used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        use = self.head(hidden).softmax(-1).sum(0)
        return self.head(hidden), use.var() / use.mean() ** 2


class BalanceKept(Balanced):
    """Leaves that number in an attribute of a layer, as many layers of experts do."""

    def forward(self, x: Tensor) -> Any:
        scores, self.head.balance = super().forward(x)
        return scores


class MeanKept(NormOfBatch):
    """Leaves a mean over its samples in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        self.penalty = hidden.square().sum(1).mean()
        return self.head(hidden)


class TimeFirst(nn.Module):
    """A recurrent model whose sequences are as long as a rank has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(1, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[..., None])[1][0])


class SumInside(NormOfBatch):
    """Returns a sum over samples, which the loop divides."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.head(hidden.tanh()), hidden.square().sum()


class Squeezed(NormOfBatch):
    """Returns scores without the dimension of samples where there is one sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())[:, :1].squeeze()


class Padded(NormOfBatch):
    """Returns sequences that end with the longest one."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.abs().long().clamp(1, 5)[:, 0]
        steps = torch.arange(int(lengths.max()))
        hidden = x[:, : len(steps), None] * (steps < lengths[:, None])[..., None]
        return hidden.expand(-1, -1, 5) * self.body.weight[0] + self.body.bias[:5]


def error_of(strategy: str, model_class: Callable[[], nn.Module], compute_loss: Any) -> str:
    """Return the error of a loop of three steps; "" without one."""
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model = model_class().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = 2 * torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(30) % 4
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), batch_size=10)
    )
    for x, y in loader:
        optimizer.zero_grad()
        try:
            run.backward(compute_loss(run, model, x, y))
        except UsageError as error:
            return str(error)
        optimizer.step()
    return ""


def errors_of(strategy: str, cases: list[tuple[Callable[[], nn.Module], Any]]) -> list[str]:
    return [error_of(strategy, *case) for case in cases]


def cross_entropy(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def by_forward(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.forward(x), y)


def by_method(run: shoal.Run, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.scores(x), y)


def with_balance(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores, balance = model(x)
    return F.cross_entropy(scores, y) + 0.1 * balance


def with_kept_balance(run: shoal.Run, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.1 * model.head.balance


def with_kept_mean(run: shoal.Run, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.1 * model.penalty


def without_balance(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[0], y)


def divided_sum(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores, total = model(x)
    return (F.cross_entropy(scores, y, reduction="sum") + total) / len(x)


def by_functional_call(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    scores = torch.func.vmap(
        lambda row: torch.func.functional_call(model, parameters, (row[None],))[0]
    )(x)
    return F.cross_entropy(scores, y) + F.cross_entropy(model(x), y)


def squared(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y.double())


def of_first_steps(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[:, 0].square().mean()


MIXING: list[tuple[Callable[[], nn.Module], Any]] = [
    (NormOfBatch, cross_entropy),
    (Observed, cross_entropy),
    (CountedIds, cross_entropy),
    (Balanced, with_balance),
    (BalanceKept, with_kept_balance),
    (NormInMethod, by_forward),
    (NormInMethod, by_method),
    (partial(NormInMethod, in_block=True), by_method),
]
SINGLE: list[tuple[Callable[[], nn.Module], Any]] = [
    (TimeFirst, lambda run, model, x, y: cross_entropy(run, model, x.t(), y)),
    (Balanced, without_balance),
    (BalanceKept, cross_entropy),
    (MeanKept, with_kept_mean),
    (SumInside, divided_sum),
    (Squeezed, squared),
    (Padded, of_first_steps),
    (Squeezed, lambda run, model, x, y: F.mse_loss(model.forward(x), y.double())),
]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_model_that_computes_outputs_of_several_samples_together_is_refused(
    strategy: str,
) -> None:
    for found in world.run(2, errors_of, strategy, MIXING):
        for text, (model_class, _) in zip(found, MIXING, strict=True):
            assert "a model has computed from several samples" in text, model_class
            assert 'run.backward(loss, reduction="ranks")' in text


def single() -> list[str]:
    return errors_of("ddp", SINGLE)


def test_a_model_that_does_not_is_no_matter_in_which_dimension_its_samples_lie() -> None:
    assert world.run(2, single) == [[""] * len(SINGLE)] * 2


def linear() -> nn.Module:
    return nn.Linear(5, 4)


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def above_median(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model, x, y)
    return (losses * (losses > losses.median())).mean()


def confident(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model, x, y)
    return (losses * (losses.detach() < 1.4)).mean()


def weighted_by_pairs(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Weight each sample by the pairs that a miner finds, as pytorch-metric-learning does."""
    scores = model(x)
    near = torch.cdist(scores.detach(), scores.detach()) < 1.5
    one, other = torch.where(near & (y[:, None] != y))
    index, count = torch.unique(torch.cat([one, other]), return_counts=True)
    weights = torch.full_like(scores[:, 0], 0.5).detach()
    weights[index] = count.to(weights.dtype)
    return (F.cross_entropy(scores, y, reduction="none") * weights).mean()


def of_confident_alone(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model, x, y)
    rows = (losses.detach() < 1.4).nonzero().flatten()
    return (losses[rows].sum() + 0 * losses.sum()) / len(x)


def test_a_mask_that_follows_from_other_samples_is_refused_and_one_of_the_sample_is_not() -> None:
    losses = above_median, weighted_by_pairs, confident, of_confident_alone
    for *by_others, by_itself, chosen in world.run(
        2, errors_of, "ddp", [(linear, loss) for loss in losses]
    ):
        for text in by_others:
            assert "computed from other samples of this rank (test_models_of_loops.py:" in text
        assert by_itself == chosen == ""


def test_calls_inside_of_a_transform_of_functions_are_left_alone() -> None:
    assert world.run(2, error_of, "ddp", linear, by_functional_call) == ["", ""]


def error_of_hidden_states(samples: int) -> str:
    """Hand the hidden state of four directions, (4, samples, 3), from one model to another."""
    run = shoal.init("ddp", announce=lambda _: None)
    coder, decoder = nn.GRU(5, 3, 2, bidirectional=True), nn.GRU(5, 3, 2)
    parameters = [*coder.parameters(), *decoder.parameters()]
    loader = DataLoader(TensorDataset(torch.rand(2 * samples, 6, 5)), batch_size=2 * samples)
    coder, decoder, _, loader = run.prepare(
        coder, decoder, torch.optim.SGD(parameters, lr=0.1), loader
    )
    for (x,) in loader:
        _, hidden = coder(x.transpose(0, 1))
        output, _ = decoder(torch.zeros(2, len(x), 5), hidden[:2])
        try:
            run.backward(output.square().mean())
        except UsageError as error:
            return str(error)
    return ""


def test_a_hidden_state_of_as_many_layers_as_samples_mixes_none() -> None:
    assert world.run(2, in_turn, error_of_hidden_states, (4,), (3,)) == [["", ""]] * 2


def notes_of_many_calls() -> list[str]:
    """Call a model more often for one loss than outputs are held."""
    notes: list[str] = []
    run = shoal.init("zero3", announce=notes.append)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.rand(6, 5)), batch_size=6)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for (x,) in loader:
        first = model(x)
        outputs = [model(x + number) for number in range(9)]
        run.backward(torch.stack([first, *outputs]).square().mean())
    return [note for note in notes if "parameter of no prepared model" in note]


def test_weights_behind_more_calls_than_are_held_are_those_of_the_model() -> None:
    assert world.run(2, notes_of_many_calls)[0] == []
