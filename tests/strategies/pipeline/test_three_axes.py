"""Slices in stages in shares: tensor, pipeline and a data strategy at once train as one device
does.
"""

import pytest
import torch
import torch.nn.functional as F
from pipeline_ranks import statistics
from tensor_parallel_models import CUT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shoal.run import init_with_place
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification.trajectory import Experiment
from tests.matrix.cases import EXPERIMENTS, gpt, image_loader, mean_over_tokens, tokens


class Straight(nn.Module):
    """BatchNorm between two convolutions; what it sees is the same for one device and for
    micro-batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
            nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.blocks(x)
        return scores


STRAIGHT = Experiment(Straight, image_loader, F.cross_entropy)


@pytest.mark.parametrize(
    ("strategy", "experiment"),
    [
        # Where the stage begins is for the pipeline to find: of five steps one place parts no pair
        # of layers.
        ("tensor=2,pipeline=2,cuts=layers.5", CUT["mlp"]),
        # One matrix for query, key and value is regrouped by messages in the half of the backward
        # pass for weights.
        pytest.param(
            *("tensor=2,pipeline=2,schedule=zero-bubble", EXPERIMENTS["TransformerEncoder"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_slices_of_stages_are_one_device(strategy: str, experiment: Experiment) -> None:
    check_strategy(strategy, 4, experiment)


def held() -> dict[str, int]:
    """Numbers that this rank holds of each parameter, and of the optimizer's state of it.

    Without guards, which refuse that a script reads the state of one stage.
    """
    run = init_with_place(
        "tensor=2,pipeline=2,zero1", precision="fp64", announce=lambda _: None, guards=False
    )
    model = gpt().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(tokens(), batch_size=10))
    x, y = next(iter(loader))
    run.forward_backward(supervised(mean_over_tokens, model), x, y)
    optimizer.step()
    sizes = {name: _size(parameter) for name, parameter in run.parameters().items()}
    state = sum(_size(value["momentum_buffer"]) for value in optimizer.state.values())
    alive = sum(
        p.numel() for p in model.parameters() if not p.is_meta and not isinstance(p, DTensor)
    )
    return sizes | {"state": state, "alive": alive}


def _size(tensor: Tensor) -> int:
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


@pytest.mark.slow
def test_a_rank_holds_a_slice_of_its_stage_and_a_shard_of_its_states() -> None:
    found = world.run(8, held)
    whole = {name: parameter.numel() for name, parameter in gpt().named_parameters()}
    matrix = "token_embedding.weight"  # tied: in slices at both ends
    for rank in (0, 7):
        sizes = {name: size for name, size in found[rank].items() if name in whole}
        assert sizes[matrix] == whole[matrix] // 2
        assert all(size in (whole[name], whole[name] // 2) for name, size in sizes.items())
        total = sum(sizes.values())
        # Rows are shared out by two; of an odd number the first rank has one more.
        assert abs(found[rank]["state"] - total / 2) <= 8 * len(sizes)
        # What is alive of the model is what this rank holds: no whole matrix is left behind.
        assert found[rank]["alive"] <= sum(
            size for name, size in sizes.items() if size == whole[name]
        )
    assert found[0].keys() != found[7].keys()


@pytest.mark.slow
def test_running_statistics_of_slices_are_those_of_the_same_micro_batches() -> None:
    strategy = "pipeline=2,microbatches=5,cuts=blocks.1"
    one, _ = world.run(2, statistics, strategy, STRAIGHT, "blocks.0.1.")
    for told in world.run(4, statistics, f"tensor=2,{strategy}", STRAIGHT, "blocks.0.1."):
        assert told.keys() == one.keys()
        torch.testing.assert_close(told, one, rtol=1e-10, atol=1e-12)
