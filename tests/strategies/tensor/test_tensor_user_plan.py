"""Models with the names of Hugging Face's library are divided, and train as on one device."""

import pytest
from huggingface_shaped_models import NAMED, bert, gpt2, gpt2_without_dropout, llama, opt, t5
from torch import nn

from shoal.strategies.tensor.strategy import TensorParallel, tensor_plan
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.matrix.cases import mean_over_tokens, token_loader

QUICK = {("gpt2", "tensor=2")}
CELLS = [(name, strategy) for name in NAMED for strategy in ("tensor=2", "tensor=2,sequence=true")]
CELLS.remove(("t5", "tensor=2,sequence=true"))  # no attention of it is cut


@pytest.mark.parametrize(
    ("name", "strategy"),
    [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_what_is_known_by_its_names_trains_as_on_one_device(name: str, strategy: str) -> None:
    check_strategy(strategy, 2, NAMED[name])


@pytest.mark.slow
def test_weights_that_lie_the_other_way_round_go_with_shards() -> None:
    experiment = Experiment(gpt2_without_dropout, token_loader, mean_over_tokens)
    check_strategy("tensor=2,zero3", 4, experiment, accumulate=2)


def block_styles(model: nn.Module) -> dict[str, str]:
    found = tensor_plan(model, TensorParallel(2)).parallel_styles()
    return {
        name.removeprefix("h.0."): how for name, how in found.items() if name.startswith("h.0.")
    }


HEADS_COLUMN, HEADS_ROW = "column, by heads", "row, by heads"


def test_gpt2_is_cut_though_its_weights_lie_the_other_way_round() -> None:
    found = {
        "attn.c_attn": HEADS_COLUMN,
        "attn.c_proj": HEADS_ROW,
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    }
    assert block_styles(gpt2()) == found


def test_llama_is_cut_between_its_groups_of_heads() -> None:
    attention = dict.fromkeys(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), HEADS_COLUMN
    )
    pair = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
    assert block_styles(llama()) == attention | {"self_attn.o_proj": HEADS_ROW} | pair


def test_bert_is_cut_across_the_modules_that_its_layers_lie_in() -> None:
    found = block_styles(bert())
    assert found["attention.self.query"] == HEADS_COLUMN
    assert found["attention.output.dense"] == HEADS_ROW
    assert (found["intermediate.dense"], found["output.dense"]) == ("column", "row")


def test_opt_is_cut() -> None:
    found = block_styles(opt())
    assert (found["self_attn.out_proj"], found["fc1"], found["fc2"]) == (HEADS_ROW, "column", "row")


def test_attention_that_is_handed_a_bias_of_all_heads_stays_whole() -> None:
    made = tensor_plan(t5(), TensorParallel(2))
    assert set(block_styles(t5())) == {f"DenseReluDense.{name}" for name in ("wi", "dropout", "wo")}
    assert (
        made.replicated["h.0.SelfAttention.q"]
        == "it is handed position_bias, which has a part for each head"
    )
