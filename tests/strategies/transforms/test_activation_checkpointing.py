"""Recomputing changes memory and no number."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused, UsageError
from shoal.run.supervised import supervised


class Block(nn.Sequential):
    """A block that the model repeats."""


class Model(nn.Module):
    """Four blocks of different width, with random masks and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 40, 30, 20, 10]
        self.blocks = nn.ModuleList(
            Block(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Dropout(0.4), nn.Tanh())
            for a, b in pairwise(widths)
        )
        self.calls = [0] * len(self.blocks)
        for index, block in enumerate(self.blocks):
            block[0].register_forward_pre_hook(lambda *_, index=index: self.count(index))

    def count(self, index: int) -> None:
        self.calls[index] += 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(strategy: str, steps: int = 3) -> tuple[Model, list[list[int]]]:
    """Return the model after some steps, and how often each block ran in each step."""
    torch.manual_seed(0)
    model = Model().double()
    run = shoal.init(strategy, announce=lambda _: None)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    for _ in range(steps):
        model.calls = [0] * 4
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, torch.arange(8))
        optimizer.step()
        calls.append(model.calls)
    return model, calls


@pytest.mark.parametrize(
    "strategy",
    [
        "recompute,ddp",
        pytest.param("recompute=2,ddp", marks=pytest.mark.slow),
    ],
)
def test_weights_masks_and_running_statistics_are_the_same(strategy: str) -> None:
    expected, _ = trained("ddp")
    found, _ = trained(strategy)
    assert all(
        torch.equal(a, b)
        for a, b in zip(expected.state_dict().values(), found.state_dict().values(), strict=True)
    )


class Normed(nn.Module):
    """Blocks that read a buffer which their last call has changed."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.blocks = nn.Sequential(
            *(nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks(x)
        return output


class Rolled(nn.Module):
    """A block that replaces its buffer by another tensor, and runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Rolling(), Rolling()])

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return x


class Rolling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        output: Tensor = torch.tanh(self.layer(x)) * self.mean
        return output


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


@pytest.mark.parametrize("model_fn", [Normed, Rolled])
def test_buffers_that_a_block_reads_and_changes_are_read_again_as_they_were(
    model_fn: type[nn.Module],
) -> None:
    verdict = shoal.verify(model_fn, batch, F.mse_loss, "recompute", ranks=1)
    assert verdict.verdict == "exact", verdict


def test_a_copy_computes_with_its_own_weights() -> None:
    model, _ = trained("recompute,ddp")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert not copied(torch.randn(8, 6, dtype=torch.float64)).any()


def test_every_kth_unit_is_computed_twice() -> None:
    assert trained("recompute,single")[1] == [[2, 2, 2, 2]] * 3
    assert trained("recompute=3,single")[1] == [[2, 1, 1, 2]] * 3


def test_an_evaluation_computes_once() -> None:
    model, _ = trained("recompute,single")
    model.calls = [0] * 4
    with torch.no_grad():
        model(torch.zeros(8, 6, dtype=torch.float64))
    assert model.calls == [1, 1, 1, 1]


def test_a_unit_that_the_model_has_not_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = Block(nn.Linear(3, 3))

    model = Net()
    with pytest.raises(StrategyRefused, match="no module of that class; did you mean 'Block'"):
        shoal.init("recompute,unit=Blok", announce=lambda _: None).prepare(
            model, torch.optim.SGD(model.parameters())
        )


def test_a_model_without_blocks_is_refused_with_the_cure() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(StrategyRefused, match="Name the class of its blocks: recompute,unit=CLASS"):
        shoal.init("recompute", announce=lambda _: None).prepare(
            model, torch.optim.SGD(model.parameters())
        )


class Growing(nn.Module):
    """A block that keeps what it has seen, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        out: Tensor = self.layer(x.view(len(self.seen), 4))
        return out


def test_a_block_that_fails_when_it_is_computed_again_is_named_with_the_cure() -> None:
    run = shoal.init("recompute,single", announce=lambda _: None)
    model = nn.Sequential(Growing(), nn.Linear(4, 4))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StrategyRefused, match=r"recompute: Growing fails .*use_cache=False"):
        run.forward_backward(lambda x: model(x).square().mean(), torch.ones(1, 4))


def test_other_weights_than_its_own_are_refused_where_a_module_computes_again() -> None:
    run = shoal.init("recompute,single", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def compute_loss(x: Tensor) -> Tensor:
        other = {name: weight * 2 for name, weight in model.named_parameters()}
        loss: Tensor = torch.func.functional_call(model, other, (x,)).square().mean()
        return loss

    with pytest.raises(UsageError, match="given as another tensor"):
        run.forward_backward(compute_loss, torch.ones(3, 4))


class Annealed(nn.Module):
    """Lowers its temperature with each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.layer(x) / self.temperature)
        self.temperature *= 0.5
        return out


def annealed(strategy: str) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Annealed() for _ in range(3))).double()
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(4):
        x = run.share(torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double())
        losses.append(run.forward_backward(lambda x: model(x).square().mean(), x).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model[0].temperature


def test_a_number_that_a_block_changes_is_recomputed_as_it_was_and_counts_once() -> None:
    assert annealed("recompute") == annealed("single")
