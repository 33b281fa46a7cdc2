"""What `prepare` takes, what it says before the first step, and errors with a cure where that
would go wrong.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from minimal_script import parts, quiet
from torch import Tensor, nn

import shoal
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world


def test_everything_is_returned_in_the_order_in_which_it_was_given() -> None:
    run = quiet()
    model, optimizer, loader = parts()
    other = nn.Linear(2, 2).double().requires_grad_(False)
    shared, same_optimizer, first, second = run.prepare(loader, optimizer, model, other)
    assert same_optimizer is optimizer
    assert (first, second) == (model, other)
    assert len(list(shared)) == 3
    assert run.prepare(nn.Linear(2, 2).double().requires_grad_(False)).weight.shape == (2, 2)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ("model.pt", "argument 2 is a str; prepare takes models"),
        (3, "argument 2 is a int; prepare takes models"),
        (torch.ones(2), "run.share"),
        (F.cross_entropy, "functions stay as they are"),
    ],
)
def test_an_argument_of_another_kind_is_named_with_its_position(thing: Any, words: str) -> None:
    model, optimizer, _ = parts()
    with pytest.raises(UsageError, match=re.escape(words)):
        quiet().prepare(model, thing, optimizer)


def test_a_scheduler_stays_as_it_is() -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="argument 3 is a StepLR; schedulers stay as they are"):
        quiet().prepare(model, optimizer, scheduler, loader)


def test_an_optimizer_that_lost_a_parameter_is_named() -> None:
    model, _, loader = parts()
    with pytest.raises(
        UsageError, match=r"bias: trainable, but in no group.*requires_grad_\(False\)"
    ):
        quiet().prepare(model, torch.optim.SGD([model.weight], lr=0.1), loader)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _, loader = parts()
    with pytest.raises(UsageError, match="do not belong to the model"):
        quiet().prepare(model, torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1), loader)


def test_a_weight_of_a_loss_that_is_in_no_model_is_told_where_to_go() -> None:
    model, _, loader = parts()
    weights = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(UsageError, match="goes into a module of its own"):
        quiet().prepare(model, torch.optim.SGD(weights, lr=0.1), loader)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_a_model_that_torch_jit_has_compiled_is_refused_with_the_cure() -> None:
    model = torch.jit.script(nn.Linear(4, 3))
    with pytest.raises(UsageError, match="Prepare the model itself"):
        quiet().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_frozen_parameter_may_be_in_the_optimizer_and_never_moves() -> None:
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    run = quiet()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    assert torch.equal(model.bias, before)


def test_a_parameter_unfrozen_after_prepare_is_named() -> None:
    run = quiet()
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    model.bias.requires_grad_(True)
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match="bias: unfrozen after prepare"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def test_an_unknown_strategy_and_an_unknown_option_are_named() -> None:
    with pytest.raises(shoal.ShoalError, match="'dpp' is not known; did you mean 'ddp'"):
        shoal.init("dpp")
    with pytest.raises(
        shoal.ShoalError, match="option 'unsed' is not known; did you mean 'unused'"
    ):
        shoal.init("ddp,unsed=true")


def test_ddp_refuses_a_model_without_trainable_parameters() -> None:
    model, optimizer, loader = parts()
    model.requires_grad_(False)
    with pytest.raises(StrategyRefused, match="no trainable parameter"):
        quiet().prepare(model, optimizer, loader)


def own_group_of_another_size() -> None:
    import os

    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    shoal.init()


def test_a_process_group_that_contradicts_the_environment_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"process group says rank . of 2, the environment"):
        world.run(2, own_group_of_another_size)


def rank_dependent_start() -> Tensor:
    run = quiet()
    torch.manual_seed(run.rank)
    model, _, _ = run.prepare(*parts(nn.Linear(4, 3).double()))
    weight: Tensor = model.weight.detach().clone()
    return weight


def test_every_rank_starts_from_rank_0s_weights() -> None:
    first, second = world.run(2, rank_dependent_start)
    assert torch.equal(first, second)


def test_all_wrong_arguments_of_init_are_told_at_once() -> None:
    with pytest.raises(shoal.ShoalError) as error:
        shoal.init(5, seed="a", accumulate=2.5, precision="fp23", trace=3)  # type: ignore[arg-type]
    for words in ("strategy: 5", "seed: 'a'", "accumulate: 2.5", "did you mean 'fp", "trace: 3"):
        assert words in str(error.value)
