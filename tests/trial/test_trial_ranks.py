"""Trials on several ranks, under each strategy: no collective, and the same end on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


def steps(strategy: str, padded: bool, with_trials: bool = True) -> tuple[str, list[float]]:
    """Three steps. Returns the error that ended them, and the losses."""
    lines: list[str] = []
    run = shoal.init(strategy, precision="fp64", announce=lines.append, guards=with_trials)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)).double()
    targets = torch.randint(0, 4, (24,))
    if padded:
        targets[-5:] = -100  # on the last rank alone
    data = TensorDataset(torch.randn(24, 6).double(), targets)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=24)
    )

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    losses = []
    for _ in range(3):
        for x, y in loader:
            try:
                losses.append(run.forward_backward(compute_loss, x, y).item())
            except UsageError as error:
                return str(error), losses
            optimizer.step()
            optimizer.zero_grad()
    return "".join(line for line in lines if "compute_loss" in line), losses


def all_of(strategies: tuple[str, ...]) -> dict[str, Any]:
    return {
        strategy: (
            steps(strategy, padded=False),
            steps(strategy, padded=False, with_trials=False),
            steps(strategy, padded=True),
        )
        for strategy in strategies
    }


def check(ranks: list[dict[str, Any]], strategies: tuple[str, ...]) -> None:
    """Assert that trials change no losses, and refuse padding on all ranks."""
    for found in ranks:
        for strategy in strategies:
            check_unchanged(found[strategy], strategy)
            assert "compute_loss is no mean over samples" in found[strategy][2][0], strategy


def check_unchanged(found: Any, strategy: str) -> None:
    (error, losses), (_, plain), _ = found
    assert error == "", strategy
    assert losses == plain, strategy


def test_ranks_try_their_rows_alone_and_refuse_together() -> None:
    strategies = ("ddp", "zero1", "zero3")
    ranks = world.run(2, all_of, strategies)
    check(ranks, strategies)
    first, last = (found["zero3"][2][0] for found in ranks)
    assert first == last, "a rank whose samples show nothing tells what another one has found"


@pytest.mark.slow
def test_layers_in_slices_and_stages_are_tried_before_they_are_divided() -> None:
    ranks = world.run(2, all_of, ("tensor=2", "pipeline=2"))
    check(ranks, ("pipeline=2",))
    for found in ranks:
        check_unchanged(found["tensor=2"], "tensor=2")
    # One data rank computes the batch at once, as one device does: a note, which one rank prints.
    first, last = (found["tensor=2"][2][0] for found in ranks)
    assert "will be refused: compute_loss is no mean over samples" in first
    assert last == ""


def padded_later(strategy: str, compiled: bool = False) -> None:
    """Four steps; labels are ignored from the second one on, on the last rank alone."""
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", compile=compiled, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    targets = torch.randint(4, (48,))
    targets[[22, 23, 34, 35, 46, 47]] = -100
    batches = DataLoader(TensorDataset(torch.randn(48, 6).double(), targets), batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batches = run.prepare(model, optimizer, batches)
    for x, y in batches:
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "compiled"), [("ddp", False), ("zero3", False), ("ddp", True)]
)
def test_a_later_batch_that_couples_samples_is_refused_when_it_comes(
    strategy: str, compiled: bool
) -> None:
    with pytest.raises(LaunchError, match="compute_loss is no mean over samples"):
        world.run(2, padded_later, strategy, compiled, timeout_s=170.0)


def steps_before_the_refusal(strategy: str, of_two_losses: bool) -> tuple[int, str]:
    """Train by a mean, and then by a loss that is none: by another function after two steps, or by
    the hard half of a batch in the same one after ten. Returns the steps that went.
    """
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = run.share(torch.randn(12, 6).double())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss(x: Tensor) -> Tensor:
        losses = model(x).square().sum(1)
        return (losses if count < 10 else losses.topk(len(x) // 2).values).mean()

    for count in range(20):
        is_second = of_two_losses and count >= 2
        try:
            run.forward_backward((lambda x: loss(x).sqrt()) if is_second else loss, x)
        except UsageError as error:
            return count, str(error)
        optimizer.step()
        optimizer.zero_grad()
    return 20, ""


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_a_loss_is_tried_in_its_own_first_step_and_again_in_step_16(strategy: str) -> None:
    calls = (strategy, True), (strategy, False)
    for of_two, of_one in world.run(2, in_turn, steps_before_the_refusal, *calls):
        assert (of_two[0], of_one[0] + 1) == (2, 16)
        for _, error in (of_two, of_one):
            assert "compute_loss is no mean over samples" in error


def baseline_of_own_losses() -> list[str]:
    """Train by losses relative to their running mean. Returns the notes."""
    torch.manual_seed(0)
    notes: list[str] = []
    run = shoal.init("ddp", precision="fp64", announce=notes.append)
    model = nn.Linear(6, 4).double()
    x = run.share(torch.randn(12, 6).double())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    mean = torch.ones(()).double()

    def loss(x: Tensor) -> Tensor:
        nonlocal mean
        value = model(x).square().mean()
        value, mean = value / mean, 0.9 * mean + 0.1 * value.detach()
        return value

    run.forward_backward(loss, x)
    optimizer.step()
    return notes


def test_a_loss_that_keeps_values_of_own_samples_gets_a_note() -> None:
    notes, _ = world.run(2, baseline_of_own_losses)
    assert sum("what it has kept of earlier samples" in note for note in notes) == 1


class Balance:
    """A weight that the loop computes from the losses that it has seen, as BEGAN does, or a bank
    of such.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.k, self.seen = torch.ones(shape).double(), 0.0


def weight_of_own_losses(strategy: str, is_read: bool, shape: tuple[int, ...] = ()) -> list[str]:
    """Train by a loss with a weight, which the loop sets by this rank's losses, and with a table
    of as many rows as one rank has samples. The loss counts on all ranks alike. Returns notes.
    """
    torch.manual_seed(0)
    notes: list[str] = []
    run = shoal.init(strategy, precision="fp64", announce=notes.append)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = run.share(torch.randn(9, 6).double())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    balance, hidden, table = Balance(shape), torch.zeros(6, 3), torch.ones(4, 6).double()
    calls = 0

    def loss(x: Tensor) -> Tensor:
        nonlocal hidden, calls
        calls += 1
        hidden = model(x).detach()
        balance.seen = model(x).square().mean().detach()
        weight = balance.k.mean() if is_read else 1.0
        return model(x * table[0]).square().mean() + weight * model(x).abs().mean()

    for _ in range(3):
        run.forward_backward(loss, x)
        optimizer.step()
        optimizer.zero_grad()
        balance.k = balance.k + 0.1 * balance.seen
    return [note for note in notes if "ranks differ in" in note]


def test_numbers_that_the_loop_computes_from_own_losses_get_a_note() -> None:
    # A large tensor is compared, and not tried with other values.
    calls = ("zero3", True), ("ddp", True), ("ddp", True, (300_000,)), ("ddp", True, (5_000_000,))
    for read, written in world.run(2, in_turn, weight_of_own_losses, *calls)[0]:
        assert "ranks differ in balance.k, with which compute_loss computes" in read
        assert "ranks differ in balance.seen, and did not before the first step" in written


def bank_of_own_outputs(classes: int, first: int = 0) -> list[str]:
    """Train towards earlier outputs of each sample, which the loop keeps from the step `first` on.
    Returns notes.
    """
    torch.manual_seed(0)
    notes: list[str] = []
    run = shoal.init("ddp", precision="fp64", announce=notes.append)
    model = nn.Linear(6, classes).double()
    index, x = run.share((torch.arange(8), torch.randn(8, 6).double()))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    bank = torch.zeros(9, classes).double()

    def loss(index: Tensor, x: Tensor) -> Tensor:
        return (model(x) - bank[index]).square().mean()

    for step in range(first + 3):
        run.forward_backward(loss, index, x)
        optimizer.step()
        optimizer.zero_grad()
        if step >= first:
            # Half of them: a loss that is zero but for rounding is not judged.
            bank[index] = 0.5 * model(x).detach()
    return [note for note in notes if "ranks differ in" in note]


def test_a_bank_of_own_outputs_gets_a_note_with_as_many_classes_as_samples_too() -> None:
    for notes in world.run(2, in_turn, bank_of_own_outputs, (3,), (4,), (3, 2))[0]:
        (note,) = notes
        assert "ranks differ in bank, with which compute_loss computes" in note


def test_a_number_that_a_loss_writes_and_does_not_read_is_told_to_be_of_one_rank() -> None:
    notes, others = world.run(2, weight_of_own_losses, "ddp", False)
    assert not others
    assert len(notes) == 1
    assert "ranks differ in balance.k, balance.seen, and did not" in notes[0]
    assert "shoal.all_reduce" in notes[0]


class CountsItsCalls(nn.Module):
    """Divides its outputs by a number that grows with its calls."""

    calls: Any

    def __init__(self, in_buffer: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        if in_buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) / (1 + self.calls)


def counts_its_calls(strategy: str, accumulate: int, in_model: bool) -> list[Any]:
    """Train by a loss, or models, that count calls. Returns the names in notes, and a count."""
    torch.manual_seed(0)
    notes: list[str] = []
    run = shoal.init(strategy, accumulate=accumulate, announce=notes.append)
    models: list[Any] = [CountsItsCalls(False), CountsItsCalls(True)] if in_model else [net()]
    x = run.share(torch.randn(16, 6).double())
    parameters = [p for model in models for p in model.parameters()]
    *models, optimizer = run.prepare(*models, torch.optim.SGD(parameters, 0.1))
    schedule = {"step": 0}

    def loss(x: Tensor) -> Tensor:
        if not in_model:
            schedule["step"] += 1
        scale = min(1.0, (schedule["step"] + 1) / 10)
        return sum(model(x).square().mean() for model in models) * scale

    for _ in range(2):
        run.forward_backward(loss, x)
        optimizer.step()
        optimizer.zero_grad()
    told = [n.partition(" changes ")[2] for n in notes if "Count steps in the loop" in n]
    counts = [models[0].calls] if in_model else []
    return [*(note.partition(". It")[0] for note in told), *counts]


class Heads(nn.Module):
    """Attention of two heads, whose number is divided between the ranks of a tensor group."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = [y.unflatten(1, (self.num_heads, 1, 4)) for y in self.qkv(x).chunk(3, dim=1)]
        return self.proj(F.scaled_dot_product_attention(*heads).flatten(1))


def notes_of_heads(strategy: str) -> list[str]:
    """Return the words of the notes that tell of heads, and of counts."""
    notes: list[str] = []
    run = shoal.init(strategy, announce=notes.append)
    model = nn.Sequential(nn.Linear(6, 8), Heads(), nn.Linear(8, 8), Heads()).double()
    x = run.share(torch.randn(16, 6).double())
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    run.forward_backward(lambda x: model(x).square().mean(), x)
    words = "column, by heads", "Count steps in the loop"
    return [word for word in words if any(word in note for note in notes)]


def test_heads_that_stages_divide_are_no_counts() -> None:
    assert world.run(4, notes_of_heads, "tensor=2,pipeline=2")[0] == ["column, by heads"]


class Recurrent(nn.Module):
    """Adds what it has kept of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.kept: Tensor | None = None
        self.graph = torch.eye(6).to_sparse()  # has no digest

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        found = found if self.kept is None else found + self.kept
        self.kept = found.detach().mean(0)
        return found


def handed_on(strategy: str, accumulate: int, in_model: bool) -> list[str]:
    """Return what notes say is kept from call to call."""
    notes: list[str] = []
    run = shoal.init(strategy, accumulate=accumulate, announce=notes.append)
    model: nn.Module = Recurrent() if in_model else net()
    x = run.share(torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double())
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    bags = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # has no sizes
    state: dict[str, Tensor] = {"bags": bags}

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x)
        if not in_model:
            found = found + state.get("kept", 0.0)
            state["kept"] = found.detach().mean(0)
        return found.square().mean()

    run.forward_backward(loss, x)
    told = [note.partition(" keeps ")[2] for note in notes if "hands them from batch" in note]
    return [note.partition(" from call")[0] for note in told]


def test_a_state_that_is_handed_on_gets_a_note_where_a_step_has_several_calls() -> None:
    calls = [("ddp", parts, in_model) for parts in (2, 1) for in_model in (False, True)]
    found = world.run(2, in_turn, handed_on, *calls)[0]
    assert found == [["state['kept']"], ["kept"], [], []]


class Centred(nn.Module):
    """Takes the mean over the samples from what it computes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(6, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(x).tanh()
        return hidden - hidden.mean(0)


def error_of_a_later_model(in_loop: bool) -> str:
    """Train one model for some steps, and then another one by the same function."""
    run = shoal.init("ddp", announce=lambda _: None)
    x = run.share(torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double())

    def train(model: nn.Module, steps: int) -> None:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(steps):
            if in_loop:
                run.backward(model(x).square().mean())
            else:
                run.forward_backward(lambda x: model(x).square().mean(), x)
            optimizer.step()
            optimizer.zero_grad()

    train(net(), 5)
    with pytest.raises(UsageError) as caught:
        train(Centred(), 2)
    return str(caught.value)


def test_a_model_that_is_prepared_later_is_tried_too() -> None:
    for of_function, of_loop in world.run(2, in_turn, error_of_a_later_model, (False,), (True,)):
        assert "compute_loss is no mean over samples" in of_function
        assert "samples" in of_loop
        assert "gradients differ" in of_loop


def losses_with_a_message(strategy: str) -> list[float]:
    """Train by a loss that talks to other ranks, on labels of which one rank gets new ones late."""
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    x, model = torch.randn(16, 6).double(), net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    told: list[float] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(model(x), y)
        told.append(float(shoal.all_reduce(value.detach(), op="mean")))
        return value

    for step in range(5):
        labels = torch.zeros(16, dtype=torch.long)
        labels[-1] = step // 3  # a row of the last rank
        run.forward_backward(loss, *run.share((x, labels)))
        optimizer.step()
        optimizer.zero_grad()
    return told


def test_a_loss_that_talks_to_other_ranks_is_not_tried_by_one_of_them() -> None:
    expected = losses_with_a_message("single")
    for told in world.run(2, losses_with_a_message, "ddp"):
        assert told == pytest.approx(expected, rel=1e-10)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def test_a_count_of_calls_gets_a_note_where_a_step_has_several() -> None:
    layouts = ("pipeline=2,microbatches=4", 1), ("ddp", 2), ("ddp", 1)
    calls = [(*layout, in_model) for in_model in (False, True) for layout in layouts]
    assert world.run(2, in_turn, counts_its_calls, *calls)[0] == [
        ["schedule['step']"],
        ["schedule['step']"],
        [],
        ["calls", 8],
        ["calls", 4],
        [2],
    ]


class OwnLoss(nn.Module):
    """Computes its own loss inside, of tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return F.cross_entropy(self.head(hidden * self.scale).transpose(1, 2), labels)


def own_losses(strategy: str, padded: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """Two steps of a model that returns its loss. Returns the error, the losses, the weights."""
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model = OwnLoss().double()
    tokens = torch.randint(0, 5, (10, 4))
    labels = tokens.roll(1, 1)
    if padded:
        labels[-1:, 1:] = -100
    batch = DataLoader(TensorDataset(tokens, labels), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batch = run.prepare(model, optimizer, batch)
    losses = []
    for _ in range(2):
        for x, y in batch:
            try:
                losses.append(run.forward_backward(lambda x, y: model(x, labels=y), x, y).item())
            except UsageError as error:
                return str(error), losses, {}
            optimizer.step()
            optimizer.zero_grad()
    assert model.calls == len(losses), "a trial leaves no trace"
    return "", losses, run.weights()


def own_losses_of(strategies: list[str]) -> dict[str, Any]:
    return {name: [own_losses(name, padded) for padded in (False, True)] for name in strategies}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "ranks"),
    [
        (["zero1", "zero3", "zero3,offload=true"], 2),
        (["zero2", "recompute,zero3"], 3),
        (["tensor=2,ddp"], 4),
        (["zero3,hybrid=2", "tensor=2,zero3"], 4),
    ],
)
def test_models_in_shards_are_tried_whole(strategies: list[str], ranks: int) -> None:
    _, expected, weights = own_losses("single", padded=False)
    for found in world.run(ranks, own_losses_of, strategies):
        for strategy, ((error, losses, trained), (refusal, before, _)) in found.items():
            assert error == "", strategy
            assert losses == pytest.approx(expected, rel=1e-10), strategy
            torch.testing.assert_close(trained, weights, rtol=1e-10, atol=1e-12)
            assert "compute_loss is no mean over samples" in refusal, strategy
            assert before == [], strategy
