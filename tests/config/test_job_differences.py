import pytest

from shoal.config import Job, differences, read
from shoal.config.explain import NON_SEMANTIC
from shoal.config.fields import all_sections, all_settings
from shoal.config.job import ModelConfig


def test_a_job_does_not_differ_from_itself() -> None:
    assert differences(read("digits").job, read("digits").job) == []


def test_what_makes_another_experiment_is_named_with_both_values() -> None:
    there = read("digits", [("optimizer.lr", "0.1"), ("model.options.blocks", "1")]).job
    here = read(
        "digits", [("optimizer.lr", "0.2"), ("optimizer.options.maximize", "true"), ("seed", "1")]
    ).job
    assert differences(there, here) == [
        "seed: 0 there, 1 here",
        "model.options.blocks: 1 there, not set here",
        "optimizer.lr: 0.1 there, 0.2 here",
        "optimizer.options.maximize: not set there, true here",
    ]


@pytest.mark.parametrize(
    "flag",
    [
        "name=x",
        "out=x",
        "strategy=single",
        "plugin=x.py",
        "data.path=x",
        "data.workers=7",
        "train.accumulate=4",
        "model.compile=true",
        "evaluation.every=5",
        "checkpoint.keep=9",
        "checkpoint.resume=false",
        "log.every=1",
    ],
)
def test_circumstances_make_no_other_experiment(flag: str) -> None:
    name, _, value = flag.partition("=")
    assert differences(read("digits").job, read("digits", [(name, value)]).job) == []


def test_every_circumstance_is_a_setting_or_a_section() -> None:
    assert set(NON_SEMANTIC) <= {*all_settings(), *all_sections()}


def test_a_tuple_in_a_program_is_the_list_that_it_was_written_as() -> None:
    assert (
        differences(
            Job(model=ModelConfig(options={"hidden": (8, 8)})),
            Job(model=ModelConfig(options={"hidden": [8, 8]})),
        )
        == []
    )
