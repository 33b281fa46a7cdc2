"""Functions that a script calls with its parameters, where those are shards."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Language(nn.Module):
    """Makes its hidden state from a weight, as word_language_model does."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def start(self, rows: int) -> tuple[Tensor, ...]:
        weight = next(self.parameters())
        return weight.new_zeros(1, rows, 4), weight.new_full((1, rows, 4), 0.5)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.head(self.cells(x, state)[0])


def trained(strategy: str) -> dict[str, Tensor]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = Language().double()
    x = run.share(torch.arange(60.0, dtype=torch.float64).view(4, 5, 3).sin())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        state = model.start(len(x))
        assert type(state[0]) is Tensor
        optimizer.zero_grad()
        run.backward(model(x, state).square().mean())
        optimizer.step()
    return run.weights()


def test_a_hidden_state_that_is_made_from_a_weight_is_whole() -> None:
    expected = trained("single")
    for results in world.run(2, in_turn, trained, ("zero2",), ("zero3",)):
        for weights in results:
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def trained_by_data(strategy: str) -> dict[str, Tensor]:
    """Return weights after steps that write gradients and weights through `.data`."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    kept = {name: torch.rand_like(p).round() for name, p in model.named_parameters()}
    x = run.share(torch.arange(12.0, dtype=torch.float64).view(4, 3).sin())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        run.forward_backward(lambda rows: model(rows).square().mean(), x)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.sign() * 0.1
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clamp(-0.4, 0.4)
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
        parameter.data = parameter.data + 1
    return run.weights()


def test_values_that_are_assigned_to_data_reach_the_shards() -> None:
    expected = trained_by_data("single")
    for results in world.run(2, in_turn, trained_by_data, ("zero1",), ("zero3",), ("tensor=2",)):
        for weights in results:
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


class Scaled(nn.Module):
    """A matrix, which lies in shards, and a number, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 8), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x) * self.scale
        return scores


def clipped_by_a_norm_of_all(strategy: str) -> dict[str, Tensor]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = Scaled().double()
    x = run.share(torch.arange(12.0, dtype=torch.float64).view(4, 3).sin())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    run.forward_backward(lambda rows: model(rows).square().mean(), x)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    if model.scale.grad is not None:
        model.scale.grad *= norm
    optimizer.step()
    return run.weights()


def test_a_whole_gradient_is_scaled_by_a_number_of_all_shards() -> None:
    expected = clipped_by_a_norm_of_all("single")
    for results in world.run(2, in_turn, clipped_by_a_norm_of_all, ("zero1",), ("zero3",)):
        for weights in results:
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def noise_on_gradients(strategy: str, with_generator: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Return notes on random numbers, and the weights after two steps with noise on gradients."""
    notes: list[str] = []
    run = shoal.init(strategy, precision="fp64", announce=notes.append)
    torch.manual_seed(0)
    model = nn.Linear(3, 8).double()
    x = run.share(torch.arange(12.0, dtype=torch.float64).view(4, 3).sin())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        generator = torch.Generator().manual_seed(step) if with_generator else None
        optimizer.zero_grad()
        run.forward_backward(lambda rows: model(rows).square().mean(), x)
        for parameter in model.parameters():
            if parameter.grad is not None:
                noise = torch.empty_like(parameter.grad).normal_(generator=generator)
                parameter.grad += 0.1 * noise
        optimizer.step()
    return [note for note in notes if "random numbers" in note], run.weights()


def test_noise_for_shards_is_noted_once_unless_its_generator_is_in_one_state() -> None:
    _, expected = noise_on_gradients("single", True)
    for strategy in ("zero1", "zero3"):
        (notes, _), _ = world.run(2, noise_on_gradients, strategy, False)
        assert len(notes) == 1
        assert "test_shard_functions.py" in notes[0]
        for notes, weights in world.run(2, noise_on_gradients, strategy, True):
            assert notes == []
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def pruned(net: nn.Sequential) -> None:
    prune.l1_unstructured(net[0], "weight", 0.5)


def zeroed(net: nn.Sequential) -> None:
    net[0].weight.data[net[0].weight.data > 0] = 0


def refusals(strategy: str) -> list[str]:
    run = shoal.init(strategy)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    errors = []
    for act in (nn.Module.share_memory, pruned, zeroed, AveragedModel):
        try:
            act(net)
            errors.append("")
        except UsageError as error:
            errors.append(str(error))
    run.forward_backward(lambda x: net(x).square().mean(), run.share(torch.ones(4, 4)))
    optimizer.step()
    return errors


@pytest.mark.parametrize("strategy", ["zero3", "tensor=2"])
def test_what_shards_cannot_take_is_refused_with_its_cure_and_training_goes_on(
    strategy: str,
) -> None:
    shared, *written, copied = world.run(2, refusals, strategy)[0]
    assert any(written)
    assert shared.startswith("share_memory() (test_shard_functions.py:")
    for error in filter(None, written):  # torch 2.15 writes into shards by a mask
        assert error.startswith("setitem() (test_shard_functions.py:")
        assert "by model.load_state_dict(weights)" in error
    assert ("run.ema(decay) in place of AveragedModel" in copied) == (strategy == "zero3")


def scaled_rows(net: nn.Sequential) -> None:
    net[0].weight.data[:-1].div_(2)


def filled_row(net: nn.Sequential) -> None:
    nn.init.zeros_(net[0].weight.data[7])


def masked_gradient(net: nn.Sequential) -> None:
    net[0].weight.grad.narrow(0, 3, 4).zero_()


def kept_weights(net: nn.Sequential) -> None:
    net[0].weight.data.t().mul_(2)
    net[0].weight.data.chunk(2, dim=1)[1].zero_()


def after_slices(strategy: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return what writes into slices raise, and the weights after those that are taken."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    run.forward_backward(lambda x: net(x).square().mean(), run.share(torch.ones(4, 4).double()))
    errors = []
    for act in (scaled_rows, filled_row, masked_gradient):
        try:
            act(net)
        except UsageError as error:
            errors.append(str(error))
    weights = run.weights()
    weights["0.weight"][:-1].div_(2)  # the cure
    net.load_state_dict(weights)
    kept_weights(net)
    return errors, run.weights()


def test_a_write_into_a_slice_that_is_a_copy_is_refused_and_others_reach_the_shards() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    scaled_rows(net)
    kept_weights(net)
    for results in world.run(2, in_turn, after_slices, ("zero1",), ("zero3",)):
        for errors, weights in results:
            assert len(errors) == 3
            assert all("by model.load_state_dict(weights)" in error for error in errors)
            torch.testing.assert_close(weights, dict(net.state_dict()), rtol=1e-10, atol=1e-12)
