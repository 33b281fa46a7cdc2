"""What the plan of slices makes of a model that is cut in stages: the same on every rank, and
no pair in two stages.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from stages_in_turn import full_model
from tensor_parallel_models import Apart, gpt, mlp
from torch import Tensor, nn

from shoal.errors import StrategyRefused
from shoal.strategies.full_model import FullModel
from shoal.strategies.tensor.strategy import TensorParallel, tensor_plan
from tests.matrix import cases

IMAGES, TOKENS = torch.zeros(2, 1, 8, 8), torch.zeros(2, 13, dtype=torch.int64)


def uncut(model: nn.Module, sample: Tensor, *begin_with: str) -> FullModel:
    """The model, with stages that begin with these modules."""
    return full_model(model, lambda x: model(x).mean(), (sample,), begin_with)


def cuts(model: nn.Module, sample: Tensor, *begin_with: str, **options: str) -> dict[str, str]:
    before = uncut(model, sample, *begin_with)
    return tensor_plan(model, TensorParallel(2, **options), before).parallel_styles()


def columns(found: dict[str, str]) -> set[str]:
    return {name for name, how in found.items() if how == "column"}


def test_no_pair_lies_in_two_stages() -> None:
    # Four linear layers in a row: 1 and 3 make a pair, 5 and the head another.
    assert columns(cuts(mlp(), IMAGES, "layers.5")) == {"layers.1", "layers.5"}
    assert columns(cuts(mlp(), IMAGES, "layers.3")) == {"layers.3"}


def test_what_one_device_would_cut_is_cut_where_no_stage_begins_inside() -> None:
    model = gpt()
    assert (
        cuts(model, TOKENS, "blocks.1") == tensor_plan(model, TensorParallel(2)).parallel_styles()
    )


def test_the_vocabulary_is_cut_though_its_two_ends_are_in_different_stages() -> None:
    found = cuts(gpt(tied=True), TOKENS, "blocks.0", "blocks.1", "head")
    assert (found["token_embedding"], found["head"]) == ("vocabulary", "vocabulary")


class Scaled(nn.Module):
    """Something follows the head of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.after = gpt(), nn.LayerNorm(18)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.after(self.gpt(x))
        return logits


def test_logits_in_slices_cross_no_cut() -> None:
    model = Scaled()
    assert "gpt.head" in cuts(model, TOKENS, "gpt.blocks.1")
    found = tensor_plan(model, TensorParallel(2), uncut(model, TOKENS, "after"))
    assert not {"gpt.head", "gpt.token_embedding"} & found.parallel_styles().keys()
    assert found.replicated["gpt.head"] == "the pipeline is cut behind it"


def test_attention_that_the_pipeline_looks_into_stays_whole() -> None:
    model = gpt()
    found = tensor_plan(model, TensorParallel(2), uncut(model, TOKENS, "blocks.0.attention.output"))
    assert "does not run as a whole" in found.replicated["blocks.0.attention.query"]
    assert "blocks.0.mlp.up" in found.parallel_styles()  # a pair in the graph of the stage


class Reads(nn.Module):
    """Takes a weight of a layer by itself, in another stage than the one that calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.up(x.flatten(1)).relu())) + self.up.weight.sum()


class Inside(nn.Module):
    """Calls a layer of a block by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.blocks[0][2](F.relu(self.blocks[1][0](x)))


@pytest.mark.parametrize(
    ("model_fn", "begins", "stays"), [(Reads, "last", "up"), (Inside, "blocks.2", "blocks.0.2")]
)
def test_what_stages_use_in_two_ways_stays_whole(
    model_fn: Callable[[], nn.Module], begins: str, stays: str
) -> None:
    model = model_fn()
    try:
        found = cuts(model, IMAGES, begins)
    except StrategyRefused as refusal:
        assert f"  {stays}: " in str(refusal)  # noqa: PT017 - nothing else could be cut
    else:
        assert stays not in found
        assert "blocks.2.0" in found


def test_a_model_without_a_pair_in_any_stage_is_refused_with_the_cure() -> None:
    with pytest.raises(
        StrategyRefused, match="must lie in one stage of the pipeline: put its cuts elsewhere"
    ):
        cuts(cases.mlp(), IMAGES, "head")


def test_a_pair_outside_of_stages_is_as_before() -> None:
    assert columns(tensor_plan(Apart(), TensorParallel(2)).parallel_styles()) == {"one"}


class TwoHeads(nn.Module):
    """An embedding that is tied to the one of two heads that is to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(4, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(hidden) + self.lm_head(hidden)


def test_an_embedding_that_is_tied_to_a_whole_head_stays_whole() -> None:
    assert set(tensor_plan(TwoHeads(), TensorParallel(2, whole="head")).parallel_styles()) == {
        "lm_head"
    }
