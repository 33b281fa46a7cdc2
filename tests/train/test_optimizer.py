import pytest
import torch
from torch import nn

from shoal.config.job import Job, OptimizerConfig
from shoal.errors import ConfigError
from shoal.strategies import parse_line
from shoal.strategies.precheck import check_job
from shoal.train import job_precheck
from shoal.train.optimizer import build, scaled_rate

MODEL = nn.Sequential(
    nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.LSTM(2, 2)
)


def test_the_rate_is_scaled_linearly_to_the_batch() -> None:
    assert scaled_rate(OptimizerConfig(lr=0.1, reference_batch=128), 1024) == pytest.approx(0.8)
    assert scaled_rate(OptimizerConfig(lr=0.1), 1024) == pytest.approx(0.1)


def test_sgd_gets_momentum_and_nesterov_and_adamw_does_not() -> None:
    sgd = build(OptimizerConfig(nesterov=True), MODEL, 1)
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.9, True)
    assert isinstance(
        build(OptimizerConfig(name="AdamW", weight_decay=0.1), MODEL, 1), torch.optim.AdamW
    )


def test_biases_and_norm_layers_can_be_spared_from_weight_decay() -> None:
    decayed, spared = build(
        OptimizerConfig(weight_decay=0.1, decay_norm_and_bias=False), MODEL, 1
    ).param_groups
    names = {id(parameter): name for name, parameter in MODEL.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == [
        "0.weight",
        "2.weight",
        "4.weight_ih_l0",
        "4.weight_hh_l0",
    ]
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(spared["params"]) == len(list(MODEL.parameters()))


@pytest.mark.parametrize(("name", "reasons"), [("Rprop", 0), ("AdamW", 0), ("Adafactor", 1)])
def test_only_what_needs_whole_parameters_is_refused_for_shards(name: str, reasons: int) -> None:
    job = Job(optimizer=OptimizerConfig(name=name))
    assert len(check_job(job, parse_line("zero3"), 2)) == reasons


def test_options_reach_the_optimizer() -> None:
    assert build(OptimizerConfig(name="AdamW", options={"betas": (0.9, 0.95)}), MODEL, 1).defaults[
        "betas"
    ] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="Rprop", weight_decay=0.1), "Rprop takes no 'weight_decay'"),
        (OptimizerConfig(name="AdamW", nesterov=True), "AdamW takes no 'nesterov'"),
        (
            OptimizerConfig(options={"dampning": 0.1}),
            "SGD takes no 'dampning'; did you mean 'dampening'",
        ),
        (
            OptimizerConfig(nesterov=True, momentum=0.0),
            "SGD refuses its arguments: Nesterov momentum requires",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_named(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config, MODEL, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AdmaW", "'AdmaW' is not in torch.optim; did you mean 'AdamW'"),
        ("LBFGS", "LBFGS evaluates the loss several times"),
    ],
)
def test_a_name_that_a_loop_cannot_take_is_refused_before_the_run(name: str, message: str) -> None:
    (problem,) = job_precheck.problems(Job(optimizer=OptimizerConfig(name=name)))
    assert message in problem
