"""Weights that come apart between ranks are noticed, not trained apart."""

import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


def trained(act: str, strategy: str = "ddp") -> str:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(12, 6).double(), torch.randint(3, (12,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 4))
    try:
        for x, y in loader:
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            optimizer.zero_grad()
        if act == "seeded":
            torch.manual_seed(7)
        if act in ("seeded", "drawn anew"):
            model[2].reset_parameters()
        if act == "own gradients":
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, run.rank)
            optimizer.step()  # the fourth, which is compared before; the save is compared after
        run.weights()
    except UsageError as error:
        return str(error)
    return ""


def test_weights_that_ranks_draw_anew_or_step_by_gradients_of_own_rows_are_an_error() -> None:
    acts = ("seeded",), ("drawn anew",), ("own gradients",)
    for seeded, drawn, stepped in world.run(2, in_turn, trained, *acts):
        assert seeded == ""
        assert re.search(r"2\.weight has other values on data rank 1 .*torch\.manual_seed", drawn)
        assert "0.weight has other values on data rank 1 than on data rank 0" in stepped


def test_shards_that_groups_of_ranks_draw_anew_are_an_error() -> None:
    for text in world.run(4, trained, "drawn anew", "zero3,hybrid=2"):
        assert "2.weight has other values on data rank 2" in text
