"""Slices in stages in shares: tensor, pipeline and a data strategy at once train as one device
does.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pipeline_ranks import alike, statistics, train
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

SLOW = pytest.mark.slow


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
    ("strategy", "ranks", "accumulate", "experiment"),
    [
        pytest.param(
            "tensor=2,pipeline=2,schedule=zbv,zero1", 8, 1, EXPERIMENTS["gpt"], marks=SLOW
        ),
        # Where the stage begins is for the pipeline to find: of five steps one place parts no pair
        # of layers.
        ("tensor=2,pipeline=2,cuts=layers.5", 4, 1, CUT["mlp"]),
        pytest.param("tensor=2,pipeline=2,zero2", 8, 2, EXPERIMENTS["gpt"], marks=SLOW),
        # One matrix for query, key and value is regrouped by messages in the half of the backward
        # pass for weights.
        ("tensor=2,pipeline=2,schedule=zero-bubble", 4, 1, EXPERIMENTS["TransformerEncoder"]),
        pytest.param(
            "tensor=2,pipeline=2,schedule=interleaved,ddp", 8, 1, EXPERIMENTS["gpt"], marks=SLOW
        ),
        pytest.param(
            "tensor=2,pipeline=2,schedule=gpipe,zero3", 8, 1, EXPERIMENTS["cnn"], marks=SLOW
        ),
        pytest.param(
            "tensor=2,pipeline=2,schedule=naive",
            4,
            1,
            EXPERIMENTS["cnn with BatchNorm"],
            marks=SLOW,
        ),
        pytest.param(
            "tensor=2,pipeline=2,recompute,zero2", 8, 1, EXPERIMENTS["gpt, untied"], marks=SLOW
        ),
        pytest.param(
            "tensor=2,pipeline=2,schedule=zbv,recompute",
            4,
            1,
            CUT["transformer decoder"],
            marks=SLOW,
        ),
        pytest.param("tensor=2,pipeline=4,schedule=1f1b", 8, 1, EXPERIMENTS["gpt"], marks=SLOW),
        pytest.param("tensor=2,recompute", 2, 1, CUT["mlp"], marks=SLOW),
    ],
)
def test_all_at_once_is_one_device(
    strategy: str, ranks: int, accumulate: int, experiment: Experiment
) -> None:
    check_strategy(strategy, ranks, experiment, accumulate)


@SLOW
def test_every_rank_sees_what_one_process_sees() -> None:
    [one] = world.run(1, train, "gpt", "single")
    found = world.run(8, train, "gpt", "tensor=2,pipeline=2,zero1")
    for told in found:
        alike(one, told)
    said = "\n".join(found[0].summary)
    assert "8 ranks = 2 pipeline x 2 data x 2 tensor" in said
    assert "tensor=2: vocabulary: token_embedding, head" in said


@SLOW
def test_a_checkpoint_moves_between_all_three_and_other_layouts(tmp_path: Path) -> None:
    one, all_three = "single", "tensor=2,pipeline=2,zero1"
    [alone] = world.run(1, train, "gpt", one, 3, tmp_path / one)
    ranks_of_it = world.run(8, train, "gpt", all_three, 3, tmp_path / all_three)
    cut = ranks_of_it[0]
    for told in ranks_of_it[1:]:
        cut.moments.update(told.moments)
    assert cut.moments.keys() == alone.moments.keys()
    whole = torch.load(tmp_path / all_three / "model.pt", weights_only=True)
    assert set(whole) == set(alone.weights)
    for name, weight in whole.items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=1e-9, atol=1e-11, msg=name)
    for saved, expected, strategy, ranks in (
        (one, alone, all_three, 8),
        (all_three, cut, one, 1),
        (all_three, cut, "tensor=2,zero3", 4),  # `fully_shard` reads shards of slices
        (all_three, cut, "pipeline=2,schedule=interleaved", 2),
    ):
        for told in world.run(ranks, train, "gpt", strategy, 0, None, tmp_path / saved):
            for name, weight in told.weights.items():
                assert torch.equal(weight, expected.weights[name]), name
            for name, moment in told.moments.items():
                assert torch.equal(moment, expected.moments[name]), name


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


def test_running_statistics_of_slices_are_those_of_the_same_micro_batches() -> None:
    strategy = "pipeline=2,microbatches=5,cuts=blocks.1"
    one, _ = world.run(2, statistics, strategy, STRAIGHT, "blocks.0.1.")
    for told in world.run(4, statistics, f"tensor=2,{strategy}", STRAIGHT, "blocks.0.1."):
        assert told.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(told[name], value, rtol=1e-10, atol=1e-12, msg=name)
