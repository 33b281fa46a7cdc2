"""A loss that fails on parts of a batch is refused for that."""

import pytest
import torch

import shoal
from shoal.errors import UsageError
from shoal.testing import world


def hardest_rows(strategy: str, accumulate: int) -> str:
    """Return the error of a loss that takes the 2 hardest samples of each part."""
    run = shoal.init(strategy, accumulate=accumulate, announce=lambda _: None)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = run.share(torch.randn(6, 3))
    with pytest.raises(UsageError) as raised:
        run.forward_backward(lambda x: model(x).squeeze(1).topk(2).values.mean(), x)
    return str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "ranks"), [("single", 6, 1), ("pipeline=2,microbatches=6", 1, 2)]
)
def test_a_loss_that_fails_on_a_part_is_refused_for_that_in_micro_batches(
    strategy: str, accumulate: int, ranks: int
) -> None:
    for text in world.run(ranks, hardest_rows, strategy, accumulate):
        assert "it runs on 6 samples and fails on 1 of them" in text
        assert "selected index k out of range at test_step_trials.py:" in text
        assert "run.gather(tensor)" in text
