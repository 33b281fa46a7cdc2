"""A model is traced, measured and cut; the stages one after the other are the model, under its
own names.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import StrategyRefused
from shoal.strategies.full_model import free_other_params
from shoal.strategies.pipeline.balance import balanced
from shoal.strategies.pipeline.fx_trace import trace_model
from shoal.strategies.pipeline.plan import trace_for
from shoal.strategies.pipeline.stage import stages
from shoal.strategies.pipeline.stage_module import collect, unused
from shoal.strategies.pipeline.steps import cut_points, live_across, profile, steps_of
from shoal.strategies.wrap_units import innermost, units
from shoal.verification import matrix_cases

IMAGES = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 17, (4, 13), generator=torch.Generator().manual_seed(0))
MODELS: list[tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    (matrix_cases.mlp, (IMAGES[:, :, :8, :8],)),
    (matrix_cases.cnn_with_batchnorm, (IMAGES,)),
    (matrix_cases.resnet18, (IMAGES,)),
    (matrix_cases.UNet, (IMAGES,)),
    (matrix_cases.lstm, (TOKENS,)),
    (matrix_cases.TimeFirst, (TOKENS,)),
    (matrix_cases.gpt, (TOKENS,)),
    (matrix_cases.Encoder, (TOKENS,)),
    (matrix_cases.UnusualParameters, (IMAGES[:, :, :8, :8],)),
    (matrix_cases.TwoInputs, (IMAGES[:, :, :8, :8], IMAGES[:, :, 8:, 8:])),
]


@pytest.mark.parametrize(
    ("model_fn", "inputs"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_stages_in_a_row_are_the_model(
    model_fn: Callable[[], nn.Module], inputs: tuple[Tensor, ...], num_stages: int
) -> None:
    model = model_fn()
    graph = trace_for(model, num_stages, set(innermost(units(model))), len(inputs), inputs)
    seen = profile(model, graph.training, inputs)
    where = cut_points(graph.training, seen)
    begins = balanced([1.0] * len(steps_of(graph.training)), [0.0] * 1000, where, num_stages)
    parts = stages(model, graph.training, graph.evaluating, begins)
    for training in (True, False):
        model.train(training)
        values: tuple[Tensor, ...] | Tensor = ()
        with torch.no_grad():
            for part in parts:
                values = part(training, *inputs, *values)
            torch.testing.assert_close(values, model(*inputs), rtol=1e-5, atol=1e-5)
    targets = set().union(*(part.targets for part in parts))
    kept = [collect(model, part.targets) for part in parts] + [
        collect(model, set(), unused(model, targets))
    ]
    assert set().union(*(part.state_dict() for part in kept)) == set(model.state_dict())


def test_shortcuts_cross_the_cut_beside_the_stream() -> None:
    graph = trace_model(matrix_cases.UNet(), 1, frozenset(), (IMAGES,)).training
    middle = next(i for i, step in enumerate(steps_of(graph)) if str(step.target) == "middle.0")
    assert len(live_across(graph)[middle]) == 3  # two shortcuts and the stream


def test_what_is_not_held_here_is_let_go_and_keeps_its_name() -> None:
    model = matrix_cases.gpt()
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
    model = matrix_cases.UNet()
    names = [
        name
        for name, _ in collect(
            model, {name for name, _ in model.named_children()}
        ).named_parameters()
    ]
    assert names == sorted(names, key=lambda name: name.partition(".")[0])


def test_a_module_that_was_put_into_evaluation_mode_stays_in_it() -> None:
    model = matrix_cases.cnn_with_batchnorm()
    model.stem[1].eval()
    collect(model, {"stem.1", "head"})
    assert not model.stem[1].training


def test_measuring_leaves_buffers_gradients_and_the_random_state_as_they_were() -> None:
    model = matrix_cases.cnn_with_batchnorm()
    graph = trace_model(model, 1, frozenset(), (IMAGES,)).training
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    seen = profile(model, graph, (IMAGES,))
    assert all(found.time_s > 0 for found in seen.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Choosy(nn.Module):
    """Takes a way that depends on values: in itself, or in a module of its own."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(8, 8), Choosy(False) if inside else None
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inside is not None:
            return self.last(self.inside(x))
        return self.last(x) if x.sum() > 0 else x


def test_a_module_that_looks_at_values_stays_whole() -> None:
    graph = trace_model(Choosy(True), 1, frozenset(), (torch.randn(2, 8),)).training
    assert [str(step.target) for step in steps_of(graph)] == ["first", "inside", "last"]


def test_a_model_that_looks_at_values_is_refused() -> None:
    with pytest.raises(StrategyRefused, match=r"Choosy\.forward cannot be traced"):
        trace_model(Choosy(False), 1, frozenset())


class Asking(nn.Module):
    """Asks what kind of thing its input is, which a tracer's stand-in answers wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if isinstance(x, Tensor) else self.other(x)


def test_a_model_that_the_tracer_misunderstands_is_refused() -> None:
    with pytest.raises(StrategyRefused, match="gives another output than it does itself"):
        trace_model(Asking(), 1, frozenset(), (torch.randn(2, 8),))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.training)
        return self.last(x if mask is None else x * mask)


def test_training_and_evaluation_are_graphs_of_their_own() -> None:
    model = Dropping()
    graph = trace_model(model, 1, frozenset(), (torch.randn(2, 8),))
    first, last = stages(model, graph.training, graph.evaluating, [2])
    x = torch.randn(2, 8)
    torch.testing.assert_close(last(False, x, *first(False, x)), model.eval()(x))
    assert (first(True, x)[0] == 0).any()


def test_an_input_that_is_not_given_is_not_looked_for() -> None:
    model = Dropping().eval()
    x, mask = torch.randn(2, 8), torch.zeros(2, 8)
    one = trace_model(model, 1, frozenset(), (x,))
    two = trace_model(model, 2, frozenset(), (x, mask))
    assert len(steps_of(two.training)) == len(steps_of(one.training)) + 1


def test_more_stages_than_places_are_refused_with_their_number() -> None:
    with pytest.raises(
        StrategyRefused, match="9 stages need 8 places to cut the model, and its forward pass has 2"
    ):
        trace_for(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), 9, set(), 1, None)


def test_stages_are_as_equal_as_can_be() -> None:
    assert balanced([1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 2, 3], 2) == [2]
    assert balanced([5, 1, 1, 1, 1, 1], [0] * 7, [1, 2, 3, 4, 5], 2) == [1]
    assert balanced([1, 1, 1, 9], [0] * 5, [1, 2, 3], 3) in ([1, 3], [2, 3])


def test_what_belongs_together_is_parted_as_little_as_can_be_whatever_the_balance() -> None:
    assert balanced([1, 1, 1, 1], [0] * 5, [1, 2, 3], 2, [0, 0, 1, 1, 0]) == [1]
    assert balanced([1, 1, 1, 1, 1], [0] * 6, [1, 2, 3, 4], 3, [0, 2, 1, 0, 1, 0]) in (
        [2, 3],
        [3, 4],
    )


def test_of_cuts_that_are_nearly_as_good_the_one_that_sends_less_is_taken() -> None:
    costs = [1.0, 1.0, 0.02, 1.0, 1.0]
    assert balanced(costs, [0, 9, 9, 1, 9, 0], [1, 2, 3, 4], 2) == [3]
    assert balanced(costs, [0, 9, 1, 9, 9, 0], [1, 2, 3, 4], 2) == [2]
