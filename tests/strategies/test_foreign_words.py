"""Words of other programs for strategies: the same strategy, or one sentence that says what is."""

from dataclasses import fields, is_dataclass

import pytest

import shoal
from shoal.errors import ConfigError
from shoal.strategies import STRATEGIES, parse_line, text_of
from shoal.strategies.foreign_words import INSTEAD, SAME, STAGES

SPELLED = [
    ("fsdp", "zero3"),
    ("fsdp2,hybrid=2", "zero3,hybrid=2"),
    ("tp=2", "tensor=2"),
    ("tensor_parallel=2,zero=1", "tensor=2,zero1"),
    ("tensor-parallel=2,dp", "tensor=2,ddp"),
    ("pp=2,schedule=1f1b", "pipeline=2,schedule=1f1b"),
    ("ps=2,replicas=2", "server=2,replicas=2"),
    ("ac=2,fsdp", "recompute=2,zero3"),
    ("zero_stage=2", "zero2"),
    ("DP", "ddp"),
]


@pytest.mark.parametrize(("theirs", "ours"), SPELLED)
def test_other_words_for_a_strategy_are_the_same_strategy(theirs: str, ours: str) -> None:
    assert parse_line(theirs).specs == parse_line(ours).specs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hsdp", "hsdp is zero3,hybrid=K here"),
        ("tensor=2,cp=2", "'cp' is no strategy: there is no context parallelism"),
        ("sp=2", "tensor=T,sequence=true"),
        ("deepspeed", "zero1, zero2 and zero3"),
        ("zero", "the stages are zero1, zero2 and zero3"),
        ("zero=4", "the stages are zero1, zero2 and zero3"),
        ("1f1b", "pipeline=2,schedule=1f1b"),
        ("server=2,async", "server=2,staleness=async"),
        ("bf16", "mixed precision is no strategy"),
        ("dp=4", "ddp takes no value; it is '4'; the number of ranks is -n"),
    ],
)
def test_a_word_that_is_no_strategy_here_is_answered_by_its_meaning(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_line(text)
    assert message in str(error.value)
    assert "did you mean" not in str(error.value)


def test_no_word_of_others_hides_a_strategy_or_an_option_of_ours() -> None:
    classes = [entry.options for entry in STRATEGIES.values()]
    options = {field.name for each in classes if is_dataclass(each) for field in fields(each)}
    assert not (SAME.keys() | INSTEAD.keys() | set(STAGES)) & (STRATEGIES.keys() | options)
    assert set(SAME.values()) <= STRATEGIES.keys()
    assert not SAME.keys() & INSTEAD.keys()


@pytest.mark.parametrize(
    ("strategies", "text"),
    [
        ({"tensor": 2, "zero": 1}, "tensor=2,zero=1"),
        ({"ddp": True, "unused": True, "bucket_mb": 2.5}, "ddp,unused=true,bucket_mb=2.5"),
        ({"recompute": True, "zero3": True, "offload": False}, "recompute,zero3,offload=false"),
        ({"recompute": False, "pipeline": None, "ddp": True}, "ddp"),
        ({}, ""),
    ],
)
def test_a_dict_is_the_same_as_its_text(strategies: dict[str, object], text: str) -> None:
    assert text_of(strategies) == text


def test_a_script_may_give_its_strategy_as_a_dict() -> None:
    run = shoal.init({"zero": 1, "recompute": 2}, announce=lambda _: None)
    assert [type(each).__name__ for each in run._prepared._strategies][:1] == ["Precision"]
    with pytest.raises(ConfigError, match="option 'unsed' is not known"):
        shoal.init({"ddp": True, "unsed": True})


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("ddp,bucket_mb=1e1", True),
        ("zero3,hybrid=2e0", True),
        ("ddp,unused=on", False),
        ("ddp,unused=yes", False),
        ("ddp,bucket_mb=0x10", False),
    ],
)
def test_options_are_read_in_the_dialect_of_the_settings(text: str, is_read: bool) -> None:
    if is_read:
        assert parse_line(text).specs[-1].options is not None
        return
    with pytest.raises(ConfigError, match=r"must be (true or false|a number)"):
        parse_line(text)
