"""All stages of a pipeline in turn in one process, which has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.strategies.full_model import FullModel
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.absent import WalkRefusal
from shoal.strategies.pipeline.division import DividedModel, StageCall, shape_key
from shoal.strategies.pipeline.observed_units import UnitProfile, observe_units
from shoal.strategies.pipeline.plan import dry_run, plan
from shoal.strategies.pipeline.schedules import table

DEVICE = torch.device("cpu")


class OneRank(Axis):
    """The part of an axis that a plan needs, in a world of one rank."""

    def __init__(self) -> None:
        object.__setattr__(self, "rank", 0)

    def all_gather_str(self, text: str) -> list[str]:
        return [text]


def observed(
    model: nn.Module, function: Callable[..., Any], args: Any, num_stages: int, cuts: str = ""
) -> tuple[PipelineOptions, UnitProfile]:
    """Run a function once with the units of its model."""
    options = PipelineOptions(num_stages, balance="parameters", cuts=cuts)
    return options, observe_units(model, lambda: function(*args), options, DEVICE)


def full_model(
    model: nn.Module,
    function: Callable[..., Any],
    args: Any,
    cuts: Sequence[str] = (),
) -> FullModel:
    """Describe a model whose stages begin with these modules."""
    return divided(model, function, args, len(cuts) + 1, "/".join(cuts)).full_model


def divided(
    model: nn.Module,
    function: Callable[..., Any],
    args: Any,
    num_stages: int,
    cuts: str = "",
    by: str = "parameters",
) -> DividedModel:
    """Plan the stages of a model."""
    options = PipelineOptions(num_stages, balance=by, cuts=cuts)

    def call() -> Any:
        return function(*args)

    observed = observe_units(model, call, options, DEVICE)
    starts, _ = plan(OneRank(), observed, options, call)
    stage_map = observed.stage_map(starts)
    users = dry_run(observed, stage_map, call).parameter_users
    return DividedModel(observed.units, stage_map, users, table("gpipe", num_stages, 1))


def difference(
    model: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_stages: int,
    cuts: str = "",
    crossing: list[Any] | None = None,
) -> float:
    """Return the largest relative difference between the gradients of one run and of stages."""
    made = divided(model, function, args, num_stages, cuts)
    torch.manual_seed(1)
    loss = function(*args)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    values: tuple[Tensor, ...] = ()
    result: Any = None
    stage_call = StageCall(lambda: function(*args), shape_key(model, args), 1)
    names = made.crossing(stage_call)
    if crossing is not None:
        crossing += names.makers
    for stage in range(num_stages):
        values, result = made.run_stage(stage, stage_call, names, values)
    result.backward()
    differences = [abs(float(result.detach()) - float(loss.detach())) / abs(float(loss.detach()))]
    for name, parameter in model.named_parameters():
        want, got = expected[name], parameter.grad
        if want is None or got is None:
            assert want is got, name
            continue
        differences.append(float((want - got).norm() / want.norm().clamp_min(1e-30)))
    return max(differences)


def refusal(
    model: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], num_stages: int
) -> str:
    """Return the reason why a function cannot be divided; empty if it can."""
    try:
        difference(model, function, args, num_stages)
    except (WalkRefusal, StrategyRefused) as error:
        return str(error)
    return ""
