"""Models whose parameters get their memory in `prepare`: the same start under every strategy."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from shoal.weights.deferred_init import EmptyTensor

STEPS = 3
LINES = [
    *(("ddp", 2), ("zero3", 3), ("tensor=2", 2), ("pipeline=2", 2), ("server=1", 2)),
    pytest.param("zero1", 2, marks=pytest.mark.slow),
    pytest.param("local=1", 2, marks=pytest.mark.slow),
    pytest.param("tensor=2,zero3", 4, marks=pytest.mark.slow),
    pytest.param("zero2", 2, marks=pytest.mark.slow),
    pytest.param("zero3,hybrid=2", 4, marks=pytest.mark.slow),
    pytest.param("pipeline=2,tensor=2,zero1", 4, marks=pytest.mark.slow),
]


class Blocks(nn.Module):
    """A small transformer with a tied head and what initializations are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.positions = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(3)))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        nn.init.trunc_normal_(self.tokens.weight, std=0.5)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))
        return logits


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())


def trained(strategy: str) -> dict[str, Tensor]:
    """Return the weights after some steps of SGD in float64."""
    torch.set_default_dtype(torch.float64)
    run = shoal.init(strategy=strategy, seed=5, announce=str)
    with shoal.empty_weights():
        model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.randint(0, 12, (8 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(data), batch_size=8)
    )
    for (x,) in loader:
        run.forward_backward(lambda x: loss_of(model, x), x)
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, Tensor] = run.weights()
    return weights


@cache
def on_one_process() -> dict[str, Tensor]:
    return world.run(1, trained, "single")[0]


@pytest.mark.parametrize(("strategy", "ranks"), LINES)
def test_every_strategy_starts_and_trains_from_the_weights_of_one_process(
    strategy: str, ranks: int
) -> None:
    weights = world.run(ranks, trained, strategy)[0]
    torch.testing.assert_close(weights, on_one_process(), rtol=0, atol=1e-10)


def values_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, EmptyTensor)
    return tensor.values()


def orthogonal() -> nn.Linear:
    layer = nn.Linear(6, 6)
    nn.init.orthogonal_(layer.weight)
    return layer


def scaled() -> nn.Linear:
    layer = nn.Linear(400, 50)
    with torch.no_grad():
        layer.weight.normal_().mul_(0.02).add_(1.0)
        layer.weight[:, 3] = 7
        layer.bias.data = layer.weight.sum(1)
    return layer


def check_orthogonal(weight: Tensor, _: Tensor) -> bool:
    return torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-5)


def check_scaled(weight: Tensor, bias: Tensor) -> bool:
    others = torch.cat((weight[:, :3], weight[:, 4:]), 1)
    is_drawn = abs(others.mean() - 1) < 1e-3 and abs(others.std() - 0.02) < 1e-3
    return is_drawn and bool((weight[:, 3] == 7).all()) and torch.equal(bias, weight.sum(1))


def check_default(weight: Tensor, bias: Tensor) -> bool:
    bound = 16**-0.5
    return all(0.8 * bound < values.abs().max() <= bound for values in (weight, bias))


@pytest.mark.parametrize(
    ("build", "is_right"),
    [
        (orthogonal, check_orthogonal),
        (scaled, check_scaled),
        (lambda: nn.Linear(16, 40), check_default),
    ],
)
def test_an_initialization_that_is_run_later_does_what_it_does_at_once(
    build: Callable[[], nn.Linear], is_right: Callable[[Tensor, Tensor], bool]
) -> None:
    with shoal.empty_weights():
        later = build()
    at_once = build()
    assert is_right(at_once.weight, at_once.bias)
    assert is_right(values_of(later.weight), values_of(later.bias))


def test_copies_of_a_layer_start_alike_and_other_layers_do_not() -> None:
    with shoal.empty_weights():
        blocks = Blocks().blocks.layers
        other = nn.Linear(8, 16)
    first, second = (values_of(block.linear1.weight) for block in blocks)
    assert torch.equal(first, second)
    assert not torch.equal(first, values_of(other.weight))


def test_a_seed_decides_the_values_and_no_other_stream_moves() -> None:
    def built(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with shoal.empty_weights():
            layer = nn.Linear(3, 3)
        state = torch.get_rng_state()
        values = values_of(layer.weight)
        assert torch.equal(torch.get_rng_state(), state)
        return values

    first = built(1)
    assert torch.equal(built(1), first)
    assert not torch.equal(built(2), first)


def test_buffers_and_parameters_made_of_values_have_their_memory_at_once() -> None:
    with shoal.empty_weights():
        norm, model = nn.BatchNorm1d(3), Blocks()
    assert torch.equal(norm.running_var, torch.ones(3))
    assert not isinstance(model.positions, EmptyTensor)
    assert isinstance(model.tokens.weight, EmptyTensor)


def test_a_parameter_that_is_written_into_a_buffer_gives_its_values() -> None:
    with shoal.empty_weights():
        layer, buffer = nn.Linear(2, 2), torch.zeros(2, 2)
        buffer.copy_(layer.weight.detach())
    assert torch.equal(buffer, values_of(layer.weight))


def load_state(layer: nn.Linear) -> nn.Linear:
    layer.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.arange(3.0)})
    return layer


def fill_again(layer: nn.Linear) -> nn.Linear:
    layer.apply(lambda each: nn.init.ones_(each.weight))
    layer.bias.data = torch.empty_like(layer.bias)
    with torch.no_grad():
        layer.bias[:] = torch.arange(3.0)
    return layer


def convert(layer: nn.Linear) -> nn.Linear:
    return load_state(layer).double()


def take_copy(layer: nn.Linear) -> nn.Linear:
    return copy.deepcopy(load_state(layer))


def write_data(layer: nn.Linear) -> nn.Linear:
    load_state(layer).weight.data.mul_(3).sub_(2)
    layer.weight.data[1].zero_().add_(1)
    return layer


@pytest.mark.parametrize("change", [load_state, fill_again, convert, take_copy, write_data])
def test_what_a_script_does_after_the_context_counts(
    change: Callable[[nn.Linear], nn.Linear],
) -> None:
    with shoal.empty_weights():
        model = nn.Linear(3, 3)
    model = change(model)
    assert isinstance(model.weight, EmptyTensor)
    shoal.init(announce=str).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model.weight, torch.ones_like(model.weight))
    assert torch.equal(model.bias, torch.arange(3).to(model.bias))
    assert not isinstance(model.weight, EmptyTensor)


def test_a_weight_that_is_overwritten_with_itself_keeps_what_it_depends_on() -> None:
    with shoal.empty_weights(), torch.no_grad():
        weight = nn.Linear(3, 3).weight
        weight.copy_(torch.arange(9.0).view(3, 3))
        weight.copy_(weight.detach())
        weight.fill_(weight[2, 1])
    assert torch.equal(values_of(weight), torch.full((3, 3), 7.0))


def other_draws_on_each_rank() -> str:
    run = shoal.init("tensor=2", announce=str)
    torch.manual_seed(run.rank)
    with shoal.empty_weights():
        model = Blocks()
    with pytest.raises(UsageError) as caught:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_ranks_that_would_start_from_other_weights_are_refused() -> None:
    for said in world.run(2, other_draws_on_each_rank):
        assert said.startswith("prepare: the ranks have drawn other random numbers before")


def test_attributes_of_a_parameter_stay() -> None:
    with shoal.empty_weights():
        model = nn.Linear(2, 2)
    model.weight.no_decay = True
    shoal.init(announce=str).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.weight.no_decay
    assert type(model.weight) is nn.Parameter


def test_a_weight_may_be_made_of_one_of_another_context() -> None:
    with shoal.empty_weights():
        first = nn.Linear(2, 2)
    with shoal.empty_weights(), torch.no_grad():
        second = nn.Linear(2, 2)
        torch.mul(first.weight, 2, out=second.weight.data)
        second.bias.copy_(first.bias)
    assert torch.equal(values_of(second.weight), 2 * values_of(first.weight))
    assert torch.equal(values_of(second.bias), values_of(first.bias))


def test_prepare_inside_of_the_context_is_refused() -> None:
    run = shoal.init(announce=str)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="end the context before"), shoal.empty_weights():
        run.prepare(model, optimizer)


def test_a_model_of_the_meta_device_is_refused_with_the_cure() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"weight is on the meta device.* shoal\.empty_weights"):
        shoal.init(announce=str).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_hook_on_a_parameter_without_memory_is_refused() -> None:
    with shoal.empty_weights():
        model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(UsageError, match=r"has a hook.* Register hooks after run.prepare"):
        shoal.init(announce=str).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def peak_of_first_step(strategy: str, blocks: int, width: int, file: Path | None) -> int:
    """Return by how many bytes the peak of this process's memory grows up to the first step.

    Args: file: with the weights; None to draw them.
    """
    run = shoal.init(strategy=strategy, announce=str, guards=False)
    with shoal.empty_weights():
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)]
        model = nn.Sequential(*layers, nn.Linear(width, 4))
    if file is not None:
        shoal.load_weights(model, file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = TensorDataset(torch.ones(4, width), torch.ones(4, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))
    if strategy.startswith("pipeline"):  # it is divided in the first step, whose gradients count
        for x, y in loader:
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "copies"),
    [("zero3", 1), ("tensor=3", 1), ("pipeline=3", 2)],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_a_rank_holds_its_share_and_one_layer(
    strategy: str, copies: int, from_file: bool, tmp_path: Path
) -> None:
    # malloc returns what is larger than 32 MiB at once.
    blocks, width, ranks = 9, 3072, 3
    layer = width * width * 4
    file = tmp_path / "model.safetensors" if from_file else None
    if file is not None:
        weights = {f"{n}.0.weight": torch.ones(width, width) for n in range(blocks)}
        weights |= {f"{n}.0.bias": torch.ones(width) for n in range(blocks)}
        head = {f"{blocks}.weight": torch.ones(4, width), f"{blocks}.bias": torch.ones(4)}
        save_file(weights | head, file)
        del weights
    peaks = world.run(ranks, peak_of_first_step, strategy, blocks, width, file)
    share = copies * blocks * layer // ranks
    layers = 1 + from_file  # pages of the file are mapped while they are copied
    assert max(peaks) < share + layers * layer + (24 << 20) < blocks * layer, peaks
