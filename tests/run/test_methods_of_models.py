"""Losses of a loop whose models are called by their methods, return several outputs, or lie
outside of `run.prepare`; and collectives inside of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Agent(nn.Module):
    """An actor and its critic, as CleanRL's: scripts call its methods alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.actor, self.critic = nn.Linear(5, 4), nn.Linear(5, 1)
        self.scale = torch.zeros(1, requires_grad=True)  # no parameter, as SAC's log_alpha

    def evaluate(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return -F.cross_entropy(self.actor(hidden), action, reduction="none"), self.critic(hidden)

    def embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.actor(torch.tanh(self.body(x))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what another output was computed from beside it, as EBGAN's discriminator."""
        hidden = self.body(x)
        return self.critic(hidden), hidden


Loss = Callable[[shoal.Run, Agent, Tensor, Tensor], object]


def normalised_advantages(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    log_p, value = model.evaluate(x, y)
    advantages = x[:, 0] - x[:, 0].mean()
    return -(log_p * advantages).mean() + value.square().mean()


def similar_embeddings(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    z = model.embed(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


def similar_outputs_of_a_part(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model.body.forward(x))
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


def similar_outputs_of_layers(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    for layer in model.body:
        x = layer(x)
    return F.cross_entropy(x @ x.T, torch.arange(len(x)))


def pulled_away(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    value, hidden = model(x)
    similarity = F.normalize(hidden) @ F.normalize(hidden).T
    return value.square().mean() + similarity.mean()


def pulled_away_and_counted(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> object:
    return shoal.counted(pulled_away(run, model, x, y) * len(x), len(x))


def with_a_scale(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    return (model.scale.exp() * model(x)[0]).square().mean()


def of_a_reduced_product(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    hidden = model(x)[1]
    product = hidden.T @ hidden / 8
    dist.all_reduce(product)
    return product.square().sum() / len(x)


def advantages_of_all(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    log_p, value = model.evaluate(x, y)
    advantages = x[:, 0] - run.gather(x[:, 0]).mean()
    return -(log_p * advantages).mean() + value.square().mean()


def of_both_outputs(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    value, hidden = model(x)
    return (value.square().mean(1) * hidden.square().mean(1)).mean()


def trained(
    loss: Loss,
    strategy: str = "ddp",
    as_function: bool = False,
    build: Callable[[], nn.Module] = Agent,
) -> tuple[str, list[str], dict[str, Tensor]]:
    """Return the error of a loop, its notes, and its weights."""
    notes: list[str] = []
    run = shoal.init(strategy, announce=notes.append)
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(24, 6).double(), torch.randint(0, 4, (24,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    try:
        for x, y in loader:
            optimizer.zero_grad()
            if as_function:
                run.forward_backward(lambda x, y: loss(run, model, x, y), x, y)
            else:
                run.backward(loss(run, model, x, y))
            optimizer.step()
    except UsageError as error:
        return str(error), notes, {}
    return "", notes, run.weights()


def test_samples_that_a_loss_mixes_are_refused_where_a_method_was_called() -> None:
    calls = similar_embeddings, similar_outputs_of_a_part, similar_outputs_of_layers
    every = [(loss,) for loss in (normalised_advantages, *calls)]
    mixed, *compared = world.run(2, in_turn, trained, *every)[0]
    assert "the loop has computed from other samples of this rank (test_methods_of" in mixed[0]
    for error, *_ in compared:
        assert "a loss in which samples influence one another" in error


def test_an_output_of_which_another_one_was_computed_is_looked_at_too() -> None:
    calls = (pulled_away,), (pulled_away_and_counted,)
    for error, *_ in world.run(2, in_turn, trained, *calls)[0]:
        assert "a loss in which samples influence one another" in error


@pytest.mark.parametrize("as_function", [False, True])
def test_a_tensor_that_was_not_prepared_and_a_collective_get_a_note(as_function: bool) -> None:
    calls = [(loss, "ddp", as_function) for loss in (with_a_scale, of_a_reduced_product)]
    scale, reduced = world.run(2, in_turn, trained, *calls)[0]
    (note,) = [line for line in scale[1] if "no prepared model" in line]
    assert "depends on a tensor of shape (1,) that requires a gradient" in note
    (note,) = [line for line in reduced[1] if "torch.distributed has sent" in line]
    assert "(test_methods_of_models.py:" in note


def into_a_buffer(run: shoal.Run, model: Agent, x: Tensor, y: Tensor) -> Tensor:
    """Sum over ranks what no gradient goes through, as a codebook that is a moving average."""
    value, hidden = model(x)
    center = hidden.sum(0)
    dist.all_reduce(center)
    return (value - center.data.mean() / 8).square().mean()


@pytest.mark.parametrize("as_function", [False, True])
def test_what_is_sent_without_a_gradient_gets_a_note_under_tensor_alone(as_function: bool) -> None:
    calls = [(into_a_buffer, strategy, as_function) for strategy in ("ddp", "tensor=2")]
    under_ddp, under_tensor = world.run(2, in_turn, trained, *calls)[0]
    assert not [line for line in under_ddp[1] if "torch.distributed" in line]
    (note,) = [line for line in under_tensor[1] if "torch.distributed is called" in line]
    assert "over all 2 ranks, of which 2 each have the same samples" in note


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Units of zero that the script itself calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squares(run: shoal.Run, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = model(x)
    return scores.square().mean()


def test_what_shards_send_is_no_call_of_the_script() -> None:
    error, notes, _ = world.run(4, trained, squares, "tensor=2,zero1", False, Blocks)[0]
    assert (error, [line for line in notes if "torch.distributed" in line]) == ("", [])


@pytest.mark.parametrize("as_function", [False, True])
def test_losses_of_methods_and_of_several_outputs_are_exact_otherwise(as_function: bool) -> None:
    calls = [(loss, "ddp", as_function) for loss in (advantages_of_all, of_both_outputs)]
    expected = [trained(loss, "single")[2] for loss, *_ in calls]
    found = world.run(2, in_turn, trained, *calls)[0]
    for (error, notes, weights), exact in zip(found, expected, strict=True):
        assert error == ""
        assert not [line for line in notes if "no prepared model" in line or "has sent" in line]
        torch.testing.assert_close(weights, exact, rtol=1e-10, atol=1e-12)


class Packed(nn.Module):
    """A recurrent layer of packed sequences, and the mean of its outputs with their padding."""

    def __init__(self, has_total: bool) -> None:
        super().__init__()
        self.layer, self.has_total = nn.GRU(3, 4, batch_first=True), has_total

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        total = x.shape[1] if self.has_total else None
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=total)[0]


def lengths_of_packed(has_total: bool) -> list[str]:
    notes: list[str] = []
    run = shoal.init("ddp", announce=notes.append)
    model = Packed(has_total)
    data = TensorDataset(torch.randn(8, 5, 3), torch.arange(8) % 5 + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for x, lengths in loader:
        run.backward(model(x, lengths).mean(1).logsumexp(1).mean())
    return [note for note in notes if "return other lengths on other ranks" in note]


def test_outputs_that_are_as_long_as_a_ranks_own_samples_get_a_note() -> None:
    (noted,), none = world.run(2, in_turn, lengths_of_packed, (False,), (True,))[0]
    assert "[2, 4] on rank 0, [4, 4] on rank 1" in noted
    assert none == []


def lengths_of_uneven_shares() -> list[str]:
    """Train on shares of 4 and 3 samples: 4 is also the width of an output that has 2 rows each."""
    notes: list[str] = []
    run = shoal.init("ddp", announce=notes.append)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(7, 2, 5)), batch_size=7)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for (x,) in loader:
        run.backward(model(x.flatten(0, 1)).square().mean(), rows=len(x))
    return [note for note in notes if "return other lengths on other ranks" in note]


def test_a_width_that_is_one_ranks_number_of_samples_gets_no_note_on_lengths() -> None:
    assert world.run(2, lengths_of_uneven_shares) == [[], []]
