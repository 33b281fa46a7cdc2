"""Divided layers train as on one device; unknown ones stay replicated; impossible plans are
refused.
"""

import pytest
from tensor_parallel_models import CUT, Apart, Encoder, gpt
from torch import Tensor, nn

from shoal.errors import StrategyRefused
from shoal.strategies.tensor.strategy import TensorParallel, describe, tensor_plan
from shoal.testing.check_strategy import check_strategy
from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_two_slices_are_one_device(name: str) -> None:
    check_strategy("tensor=2", 2, CUT[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate", "name"),
    [
        ("tensor=2,zero3", 4, 2, "gpt"),
        ("tensor=2,recompute,unit=Core", 2, 1, "rows"),
        ("tensor=2,zero3,hybrid=2", 8, 1, "gpt"),
        ("tensor=3,ddp", 3, 1, "gated"),
    ],
)
def test_slices_go_with_data_parallelism(
    strategy: str, ranks: int, accumulate: int, name: str
) -> None:
    check_strategy(strategy, ranks, CUT[name], accumulate)


def styles(model: nn.Module, **options: str) -> dict[str, str]:
    return tensor_plan(model, TensorParallel(2, **options)).parallel_styles()


def test_only_layers_with_nothing_unknown_between_them_are_cut() -> None:
    assert styles(Apart()) == {"one": "column", "two": "row"}


def test_blocks_of_a_gpt_are_cut_between_heads_hidden_units_and_words() -> None:
    lines = describe(tensor_plan(gpt(), TensorParallel(2)))
    assert "tensor=2: vocabulary: token_embedding, head" in lines
    assert "tensor=2: column: blocks.*.mlp.up (2)" in lines
    assert any(line.startswith("tensor=2: whole: position_embedding: ") for line in lines)
    assert styles(Encoder())["layers.layers.1.self_attn"] == "heads"


def test_layers_of_a_sequence_are_named_by_their_numbers() -> None:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 8), nn.ReLU()]
    lines = describe(tensor_plan(nn.Sequential(*layers, nn.Linear(8, 4)), TensorParallel(2)))
    assert "tensor=2: column: 0, 3" in lines


class AttentionWithNorm(nn.Module):
    """Attention with a norm of each head's queries, whose gradient a rank would have in part."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(8, 8) for _ in range(4))
        self.head_width, self.norm = 4, nn.LayerNorm(4)


def test_attention_with_parameters_of_its_own_stays_whole() -> None:
    model = nn.Sequential(AttentionWithNorm(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    made = tensor_plan(model, TensorParallel(2))
    assert set(made.parallel_styles()) == {"1", "3"}
    assert "has parameters of its own, norm.weight" in made.replicated["0.query"]


class OpaqueArgument(nn.Module):
    """Passes an argument that no fx graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = (
            nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)),
            nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.pair(x), object())
        return found


def test_a_call_that_no_graph_can_hold_is_looked_around() -> None:
    assert styles(OpaqueArgument()) == {"pair.0": "column", "pair.2": "row"}


def test_what_is_to_stay_whole_stays_whole() -> None:
    assert "token_embedding" not in styles(gpt(), whole="token_embedding+head")


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    with pytest.raises(StrategyRefused, match=r"'blocks\.7' matches no module of the model"):
        tensor_plan(gpt(), TensorParallel(whole="blocks.7"))


def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_reasons() -> None:
    verdict = verify_job(EXPERIMENTS["lstm"], "tensor=2", 2)
    assert verdict.verdict == "refused"
    assert "layers.0: its state is needed whole at every time step" in verdict.reasons[0]
    assert "embedding: its 17 words are no multiple of 2" in verdict.reasons[0]
