"""`dataparallel` without a GPU: as `single`, or refused; and how calls reach the copies."""

import copy

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.strategies import parse_line
from shoal.strategies.data_parallel import replicate_calls
from shoal.strategies.precheck import check
from shoal.testing import world


class Halves(nn.Module):
    """Computes half of the rows by a copy of the module, as `nn.DataParallel` does on GPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.copies = 0

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        self.copies += 1
        copied = copy.copy(self.module)  # shares the parameters, and has the instance's attributes
        return torch.cat([self.module(first), copied(second)])


def prepared(strategy: str) -> list[str]:
    lines: list[str] = []
    run = shoal.init(strategy, announce=lines.append)
    model = nn.Linear(4, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lines


def test_on_one_device_it_does_as_single_and_says_why_ddp_is_better() -> None:
    (line,) = [line for line in prepared("dataparallel") if "dataparallel" in line]
    assert "one device (cpu), so it computes as single does" in line
    assert "ddp with a process for each GPU" in line


def refused_on_ranks() -> str:
    with pytest.raises(StrategyRefused, match="one process") as caught:
        prepared("dataparallel")
    return str(caught.value)


def test_several_ranks_are_refused_before_the_start_and_in_each_rank() -> None:
    (before,) = check(parse_line("dataparallel"), 2)
    assert {before, *world.run(2, refused_on_ranks)} == {before}


def test_calls_reach_the_copies_and_each_of_them_computes_its_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = model(x)
    halves = Halves(model)
    replicate_calls(model, halves)
    for turn in (1, 2):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-14)
        assert halves.copies == turn
    assert "forward" in vars(model)
