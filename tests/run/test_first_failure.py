"""One rank alone finds an error in a step: all ranks end with it, and none waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.testing import world


def end_of_run(strategy: str, kind: str) -> tuple[str, str]:
    """Train until the second data rank fails. Returns the class of the error and its text."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    data = TensorDataset(torch.randn(16, 6).double(), torch.randint(0, 4, (16,)))
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=8)
    )
    step = 0

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        is_second = step == 1 and run.mesh.data.rank == 1
        if kind == "their own" and is_second and not float(F.cross_entropy(scores, y)) < 0:
            raise KeyError("no such class")
        return F.cross_entropy(scores.detach() if is_second else scores, y)

    def refused_by_all(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        raise UsageError("refused on all ranks")

    with pytest.raises(UsageError, match="refused on all ranks"):  # and caught by the script
        run.evaluate(refused_by_all, DataLoader(data, batch_size=4))
    try:
        for x, y in loader:
            run.forward_backward(compute_loss, x, y)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    except (ShoalError, KeyError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_refusal_on_one_data_rank_of_a_pipeline_ends_all_ranks_with_its_reason() -> None:
    found = world.run(4, end_of_run, "pipeline=2,ddp", "a loss without gradients")
    for rank, (kind, text) in enumerate(found):
        assert kind == UsageError.__name__, rank
        assert "the loss has no gradient" in text, rank
        assert text.startswith("rank 3 says: ") == (rank != 3), text


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("pipeline=2,ddp", 4)])
def test_an_error_of_the_script_on_one_rank_is_named_by_the_others(
    strategy: str, ranks: int
) -> None:
    *others, last = world.run(ranks, end_of_run, strategy, "their own")
    assert last == ("KeyError", repr("no such class"))
    for kind, text in others:
        assert kind == PeerLost.__name__
        assert text.startswith(f"rank {ranks - 1} has ended with KeyError: 'no such class' (")
