"""A model is divided between calls of its blocks; the stages one after the other are the model,
under its own names.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stages_in_turn import difference, divided
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import StrategyRefused
from shoal.strategies.full_model import free_other_params
from shoal.strategies.pipeline.absent import WalkRefusal
from shoal.strategies.pipeline.division import StageCall, collect, unused
from shoal.strategies.pipeline.plan import balanced
from shoal.strategies.pipeline.units import find_units
from tests.matrix import cases

IMAGES = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)).double()
TOKENS = torch.randint(0, 17, (4, 13), generator=torch.Generator().manual_seed(0))
MODELS: list[tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    (cases.mlp, (IMAGES[:, :, :8, :8],)),
    (cases.cnn_with_batchnorm, (IMAGES,)),
    (cases.resnet18, (IMAGES,)),
    (cases.UNet, (IMAGES,)),
    (cases.lstm, (TOKENS,)),
    (cases.TimeFirst, (TOKENS,)),
    (cases.gpt, (TOKENS,)),
    (cases.Encoder, (TOKENS,)),
    (cases.UnusualParameters, (IMAGES[:, :, :8, :8],)),
    (cases.TwoInputs, (IMAGES[:, :, :8, :8], IMAGES[:, :, 8:, 8:])),
]


def squares(model: nn.Module) -> Callable[..., Tensor]:
    """A loss that depends on all outputs."""

    def compute_loss(*inputs: Tensor) -> Tensor:
        loss: Tensor = model(*inputs).square().mean()
        return loss

    return compute_loss


@pytest.mark.parametrize(
    ("model_fn", "inputs"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_stages_in_a_row_are_the_model(
    model_fn: Callable[[], nn.Module], inputs: tuple[Tensor, ...], num_stages: int
) -> None:
    if model_fn is cases.TwoInputs and num_stages > 2:
        pytest.skip("it has two layers, and functions between them")
    model = model_fn().double()
    assert difference(model, squares(model), inputs, num_stages) < 1e-12
    made = divided(model, squares(model), inputs, num_stages)
    targets = [made.targets(stage) for stage in range(num_stages)]
    kept = [collect(model, of_stage) for of_stage in targets]
    kept.append(collect(model, set(), unused(model, set().union(*targets))))
    assert set().union(*(part.state_dict() for part in kept)) == set(model.state_dict())


def test_shortcuts_cross_the_cut_beside_the_stream() -> None:
    model = cases.UNet().double()
    crossing: list[Any] = []
    difference(model, squares(model), (IMAGES,), 2, cuts="middle", crossing=crossing)
    assert len(crossing[0]) == 3  # two shortcuts and the stream


def test_what_is_not_held_here_is_let_go_and_keeps_its_name() -> None:
    model = cases.gpt()
    names = list(model.state_dict())
    kept = collect(model, {"token_embedding", "blocks.0"})
    free_other_params(model, kept)
    assert list(model.state_dict()) == names
    alive = [name for name, value in model.state_dict().items() if not value.is_meta]
    # The tied head is the embedding's matrix.
    assert set(alive) == {name for name in names if name.startswith(("token_emb", "blocks.0."))} | {
        "head.weight"
    }


def test_ranks_hold_their_modules_in_one_order_whatever_the_hashes_of_names() -> None:
    model = cases.UNet()
    names = [
        name
        for name, _ in collect(
            model, {name for name, _ in model.named_children()}
        ).named_parameters()
    ]
    assert names == sorted(names, key=lambda name: name.partition(".")[0])


def test_a_module_that_was_put_into_evaluation_mode_stays_in_it() -> None:
    model = cases.cnn_with_batchnorm()
    model.stem[1].eval()
    collect(model, {"stem.1", "head"})
    assert not model.stem[1].training


def test_planning_leaves_buffers_gradients_and_the_random_state_as_they_were() -> None:
    model = cases.cnn_with_batchnorm().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    divided(model, squares(model), (IMAGES,), 2, by="time")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not any("forward" in vars(module) for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_lists_of_blocks_are_looked_into_and_blocks_are_not() -> None:
    assert [*find_units(cases.gpt(), 2)] == [
        "token_embedding",
        "position_embedding",
        "blocks.0",
        "blocks.1",
        "norm",
        "head",
    ]


class Choosy(nn.Module):
    """Takes a way that depends on values, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x) if x.sum() > 0 else x


def test_a_block_may_look_at_values() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), Choosy(), nn.Linear(8, 64)).double()
    x = torch.randn(2, 8, dtype=torch.float64)
    assert difference(model, squares(model), (x,), 2, cuts="3") < 1e-12


class Dropping(nn.Module):
    """Draws in a block, in the code around the blocks, and noise that depends on nothing."""

    def __init__(self) -> None:
        super().__init__()
        widths = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
        self.blocks = nn.ModuleList(widths)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.2:  # layerdrop
                x = F.dropout(block(x) + torch.randn(8, dtype=x.dtype), 0.5, self.training)
        return x


def test_what_is_drawn_does_not_depend_on_the_number_of_stages() -> None:
    model = Dropping().double()
    x = torch.randn(2, 8, dtype=torch.float64)
    losses = set()
    for num_stages in (1, 2, 3):
        made = divided(model, squares(model), (x,), num_stages)
        for seed in (0, 5):
            call = StageCall(lambda: squares(model)(x), ("", num_stages), seed)
            crossing = made.crossing(call)
            values: tuple[Tensor, ...] = ()
            for stage in range(num_stages):
                values, loss = made.run_stage(stage, call, crossing, values)
            losses.add((seed, float(loss.detach())))
    assert len(losses) == 2


def test_more_stages_than_places_are_refused_with_their_number() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()
    with pytest.raises(WalkRefusal, match=r"9 stages need 8 places between blocks .* are 2"):
        divided(model, squares(model), (torch.randn(2, 8, dtype=torch.float64),), 9)


def test_cuts_are_names_of_modules_in_the_order_of_their_calls() -> None:
    model = cases.gpt().double()

    def loss(tokens: Tensor) -> Tensor:
        return squares(model)(tokens)

    made = divided(model, loss, (TOKENS,), 3, cuts="blocks.0.mlp/head")
    assert "blocks.0.mlp" in made.units.modules
    with pytest.raises(StrategyRefused, match="in the order of the forward pass"):
        divided(model, loss, (TOKENS,), 3, cuts="head/blocks.0")


def test_stages_are_as_equal_as_can_be() -> None:
    assert balanced([1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 2, 3], 2) == [2]
    assert balanced([5, 1, 1, 1, 1, 1], [0] * 7, [1, 2, 3, 4, 5], 2) == [1]
    assert balanced([1, 1, 1, 9], [0] * 5, [1, 2, 3], 3) in ([1, 3], [2, 3])


def test_of_cuts_that_are_nearly_as_good_the_one_that_sends_less_is_taken() -> None:
    costs = [1.0, 1.0, 0.02, 1.0, 1.0]
    assert balanced(costs, [0, 9, 9, 1, 9, 0], [1, 2, 3, 4], 2) == [3]
    assert balanced(costs, [0, 9, 1, 9, 9, 0], [1, 2, 3, 4], 2) == [2]
