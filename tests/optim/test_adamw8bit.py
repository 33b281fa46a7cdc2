"""8-bit AdamW: the same bits in every layout, saved without pickle, resumed exactly; and what
is refused.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchao.optim
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.checkpoint import Checkpoints
from shoal.comm.norm import to_local
from shoal.errors import CheckpointError, ConfigError, LaunchError
from shoal.optim.adamw8bit import AdamW8bit
from shoal.run.supervised import supervised
from shoal.testing import world

SHAPES = [(48, 256), (5, 1152), (9000,), (3, 4, 5)]


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((48, 256), 256),
        ((4096, 768), 256),
        ((64, 64, 3, 3), 192),  # 576 numbers a row
        ((64, 3, 7, 7), 147),
        ((100, 100), 100),
        ((100, 257), None),  # a prime
        ((9000,), None),
        ((10, 256), None),  # fewer than 4,096 numbers
        ((), None),
    ],
)
def test_a_block_is_the_longest_divisor_of_a_row(
    shape: tuple[int, ...], length: int | None
) -> None:
    assert AdamW8bit([nn.Parameter(torch.zeros(1))]).block_length(torch.Size(shape)) == length


def steps(shapes: list[tuple[int, ...]], lay: Callable[[Tensor], Tensor]) -> list[Any]:
    """Weights and dequantised moments, this rank's rows, after four steps on gradients that are
    the same everywhere.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(lay(torch.randn(shape, generator=generator))) for shape in shapes]
    optimizer = AdamW8bit(parameters, lr=0.01)
    for _ in range(4):
        for parameter, shape in zip(parameters, shapes, strict=True):
            parameter.grad = lay(torch.randn(shape, generator=generator))
        optimizer.step()
    return [
        [
            to_local(parameter),
            *(
                _plain(to_local(optimizer.state[parameter][key]))
                for key in ("exp_avg", "exp_avg_sq")
            ),
        ]
        for parameter in parameters
    ]


def _plain(tensor: Any) -> Tensor:
    return (
        tensor.dequantize()
        if hasattr(tensor, "dequantize") and hasattr(tensor, "codes")
        else tensor
    )


def sharded_steps() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return steps(
        SHAPES, lambda whole: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    )


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_shards_of_any_size_are_stepped_to_the_same_bits(ranks: int) -> None:
    expected = steps(SHAPES, lambda whole: whole)
    found = world.run(ranks, sharded_steps)
    for index, tensors in enumerate(expected):
        for which, tensor in enumerate(tensors):
            assert torch.equal(torch.cat([rank[index][which] for rank in found]), tensor), (
                SHAPES[index],
                which,
            )


def test_it_trains_as_torchs_adamw_does_but_for_eight_bits() -> None:
    torch.manual_seed(0)
    target, results = torch.randn(64, 256), []
    for kind in (AdamW8bit, torch.optim.AdamW):
        parameter = nn.Parameter(torch.zeros(64, 256))
        optimizer = kind([parameter], lr=0.01)
        for _ in range(30):
            parameter.grad = (parameter - target).detach()
            optimizer.step()
        results.append(parameter.detach())
    assert (results[0] - results[1]).norm() < 0.06 * results[1].norm()


class Net(nn.Module):
    """Rows of 256 and of 144 numbers, a parameter of fewer rows than ranks, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.few = nn.Conv2d(16, 40, 3), nn.Linear(2560, 2)
        self.layers = nn.ModuleList([nn.Linear(40, 256), nn.Linear(256, 40)])
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for layer in self.layers[:1]:
            x = layer(x.mean((2, 3))) if x.dim() == 4 else layer(x)
        x = self.layers[1](torch.tanh(x))
        output: Tensor = self.head(self.few(x.repeat(1, 64)))
        return output


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 16, 5, 5, generator=generator), torch.arange(24) % 3)


def prepared(strategy: str, kind: Any = AdamW8bit, **options: Any) -> tuple[Any, ...]:
    run = shoal.init(strategy, announce=lambda _: None)
    model = Net()
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    return run, *run.prepare(model, optimizer, DataLoader(data(), batch_size=6, shuffle=True))


def epoch(run: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()


def saves(directory: Path, strategy: str) -> dict[str, Tensor]:
    """An epoch, a checkpoint, an epoch more: the whole state at its end."""
    run, *parts = prepared(strategy)
    epoch(run, *parts)
    Checkpoints(directory).save(1, *run.state())
    epoch(run, *parts)
    return whole_state(run)


def resumes(directory: Path, strategy: str, epochs: int) -> dict[str, Tensor]:
    run, *parts = prepared(strategy, lr=0.5)  # the rate is among what is restored
    saved = Checkpoints(directory).load(print, like=run.layout_of())
    assert saved is not None
    run.load_state(saved.tensors, saved.info, saved.private)
    for _ in range(epochs):
        epoch(run, *parts)
    return whole_state(run)


def whole_state(run: Any) -> dict[str, Tensor]:
    tensors, _, _ = run.state()
    return {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone()
        for name, t in tensors.items()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_resumed_at_the_same_world_it_ends_bit_equal(tmp_path: Path, strategy: str) -> None:
    expected = world.run(3, saves, tmp_path, strategy)[0]
    assert sum(name.endswith(".codes") for name in expected) == 2 * 4
    assert_equal(world.run(3, resumes, tmp_path, strategy, 1)[0], expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(("zero3", 3), ("zero1", 2), marks=SLOW),
        pytest.param(("zero3", 3), ("single", 1), marks=SLOW),
        pytest.param(("ddp", 2), ("zero3", 4), marks=SLOW),
    ],
)
def test_a_checkpoint_is_exact_in_any_other_layout(tmp_path: Path, first: Any, then: Any) -> None:
    world.run(first[1], saves, tmp_path, first[0])
    expected = world.run(first[1], resumes, tmp_path, first[0], 0)[0]
    assert_equal(world.run(then[1], resumes, tmp_path, then[0], 0)[0], expected)


def test_another_block_size_is_refused_with_the_cure() -> None:
    run, *parts = prepared("single")
    epoch(run, *parts)
    with pytest.raises(
        CheckpointError, match=r"in 1 blocks of 8 bits a row .* has 2\. Use the block_size"
    ):
        prepared("single", block_size=128)[0].load_state(*run.state())


def test_moments_of_another_optimizer_are_refused_both_ways() -> None:
    eight, full = prepared("single"), prepared("single", kind=torch.optim.AdamW)
    for parts in (eight, full):
        epoch(*parts)
    with pytest.raises(CheckpointError, match="'exp_avg' in 8 bits, and this optimizer is AdamW"):
        full[0].load_state(*eight[0].state())
    with pytest.raises(
        CheckpointError, match="'exp_avg' in full precision where this AdamW8bit has 8 bits"
    ):
        eight[0].load_state(*full[0].state())


def test_codes_of_another_map_are_refused() -> None:
    run, *parts = prepared("single")
    epoch(run, *parts)
    tensors, info, private = run.state()
    tensors["optimizer.conv.weight.exp_avg.map"] = tensors["optimizer.conv.weight.exp_avg.map"] * 2
    with pytest.raises(CheckpointError, match="stand for other numbers"):
        prepared("single")[0].load_state(tensors, info, private)


def test_torchaos_own_is_refused_on_shards() -> None:
    with pytest.raises(LaunchError, match=r"AdamW8bit cannot step the shards.*AdamW8bit of shoal"):
        world.run(2, prepared, "zero1", torchao.optim.AdamW8bit)


def test_torchaos_own_cannot_be_saved_without_pickle() -> None:
    run, *parts = prepared("single", kind=torchao.optim.AdamWFp8)
    with torch.compiler.set_stance("force_eager"):
        epoch(run, *parts)
    with pytest.raises(
        CheckpointError, match=r"AdamWFp8 keeps a OptimStateFp8.*shoal\.optim\.AdamW8bit"
    ):
        run.state()


def test_an_optimizer_that_cannot_step_shards_is_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"Adafactor cannot step the shards of conv\.weight.*Use ddp, or another"
    ):
        world.run(2, prepared, "zero3", torch.optim.Adafactor)


def test_without_torchao_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal.optim.adamw8bit")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    from shoal.config.job import OptimizerConfig
    from shoal.train.optimizer import build

    with pytest.raises(ConfigError, match=r"AdamW8bit needs torchao .*pip install 'shoal\[lean\]'"):
        build(OptimizerConfig(name="AdamW8bit"), nn.Linear(2, 2), 1)


def test_a_quarter_of_the_memory() -> None:
    parameter = nn.Parameter(torch.zeros(1024, 256))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW8bit([parameter])
    optimizer.step()
    parts = optimizer.shard_state(parameter, "exp_avg", optimizer.state[parameter]["exp_avg"])
    stored = sum(part.numel() * part.itemsize for name, part in parts.items() if name != "map")
    assert stored / parameter.numel() == pytest.approx(1 + 4 / 256)
    assert math.prod(parts["scale"].shape) == 1024
