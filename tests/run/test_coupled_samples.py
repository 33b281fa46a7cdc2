"""What couples the samples of a batch is exact on any number of ranks: gathered rows, statistics
of BatchNorm, and random numbers.
"""

from collections.abc import Callable
from typing import Any

import coupled_script as script
import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ShoalError
from shoal.testing import world

Result = tuple[dict[str, Tensor], list[float], list[str]]
Case = tuple[str, Callable[[], nn.Module], Callable[..., Any], dict[str, Any]]


def all_of(cases: list[Case]) -> list[Result]:
    """Train every case one after the other."""
    return [
        script.trained(strategy, make_model(), make_loss, **options)
        for strategy, make_model, make_loss, options in cases
    ]


def plain(cases: list[Case]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Train every case without Shoal."""
    return [
        script.trained_plainly(make_model(), make_loss, options.get("batch_size", 7))
        for _, make_model, make_loss, options in cases
    ]


def check_equal(ranks: int, cases: list[Case]) -> list[list[str]]:
    """Train cases on ranks and on one device, compare, and return the lines of rank 0."""
    expected = plain(cases)
    found = world.run(ranks, all_of, cases)
    for results in found:
        for case, (weights, losses, _), (right, right_losses) in zip(
            cases, results, expected, strict=True
        ):
            assert losses == pytest.approx(right_losses, rel=1e-10), case
            torch.testing.assert_close(weights, right, rtol=1e-9, atol=1e-11)
    return [lines for _, _, lines in found[0]]


GATHERING: list[Case] = [
    ("ddp", script.tower, script.whole_contrastive_loss, {}),
    ("server=1", script.tower, script.contrastive_loss_of_one_call, {}),
    ("ddp", script.tower, script.whole_contrastive_loss, {"accumulate": 2}),
    ("ddp", script.tower, script.contrastive_loss_of_views, {"accumulate": 2}),
    ("ddp", script.tower, script.counted_contrastive_loss, {"accumulate": 3}),
    ("zero3", script.tower, script.contrastive_loss_behind_layers, {"accumulate": 2}),
]
GATHERING_IN_STAGES: list[Case] = [
    ("pipeline=2,microbatches=3", script.tower, script.whole_contrastive_loss, {}),
    ("pipeline=2,microbatches=2", script.tower, script.mixup_loss, {}),
    ("pipeline=2,microbatches=3", script.tower, script.contrastive_loss_of_views, {}),
]
MORE_IN_STAGES: list[Case] = [
    *GATHERING_IN_STAGES,
    (
        "pipeline=2,schedule=zero-bubble,microbatches=4",
        script.tower,
        script.counted_contrastive_loss,
        {},
    ),
    ("pipeline=2,microbatches=2", script.tower, script.contrastive_loss_of_own_rows, {}),
    ("pipeline=2,microbatches=1", script.tower, script.whole_contrastive_loss, {}),
    ("pipeline=2,microbatches=2", script.tower, script.contrastive_loss_behind_layers, {}),
    (
        "pipeline=2,schedule=gpipe,microbatches=2",
        script.tower,
        script.contrastive_loss_of_one_call,
        {"accumulate": 2},
    ),
]


def test_rows_are_gathered_in_a_pipeline_before_its_step() -> None:
    check_equal(2, GATHERING_IN_STAGES)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_one_and_of_two_pipelines_are_gathered(ranks: int) -> None:
    check_equal(ranks, MORE_IN_STAGES)


def refused_in_stages(strategy: str, name: str) -> str:
    with pytest.raises(ShoalError) as raised:
        script.trained(strategy, script.tower(), getattr(script, name))
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cuts", "message"),
    [
        ("contrastive_loss_behind_one_layer", "2", "use rows that run.gather has returned"),
        ("gathered_twice_loss", "2", "the rows that are gathered are others"),
    ],
)
def test_gathered_rows_that_need_a_whole_backward_pass_are_refused(
    name: str, cuts: str, message: str
) -> None:
    said = world.run(2, refused_in_stages, f"pipeline=2,microbatches=2,cuts={cuts}", name)
    assert all(message in each for each in said)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_contrastive_loss_of_gathered_rows_trains_as_on_one_device(ranks: int) -> None:
    # The last batch has two samples: the third rank has none.
    check_equal(ranks, GATHERING)


def views_in_the_order_of_ranks() -> list[str]:
    lines = []
    for options in ({}, {"accumulate": 2}):
        loss = script.contrastive_loss_of_ranks_in_turn
        lines += script.trained("ddp", script.tower(), loss, 8, **options)[2]
    model = script.tower()
    with pytest.raises(ShoalError) as raised:
        script.trained("ddp", model, lambda run, _: lambda x, *_: run.gather(model(x), views=3))
    return [*lines, str(raised.value)]


def test_rows_that_may_be_views_get_a_note_and_other_numbers_of_views_are_refused() -> None:
    lines = world.run(2, views_in_the_order_of_ranks)[0]
    notes = [line for line in lines if "run.gather(x, views=2)" in line]
    assert ["8 rows" in note for note in notes] == [True, False]
    assert "4 rows are not views=3 views" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_batchnorm_over_all_ranks_trains_as_on_one_device(ranks: int) -> None:
    synced = {"sync_batchnorm": True, "batch_size": 8}
    cases: list[Case] = [
        ("ddp", script.batchnorm_model, script.plain_loss, synced),
        ("zero3", script.batchnorm_model, script.plain_loss, synced),
        ("server=1", script.batchnorm_model, script.plain_loss, synced),
    ]
    for lines in check_equal(ranks, cases):
        assert not any("BatchNorm" in line for line in lines)


@pytest.mark.slow
def test_batchnorm_of_stages_takes_statistics_over_the_ranks_that_hold_them() -> None:
    synced = {"sync_batchnorm": True, "batch_size": 8}
    cases: list[Case] = [
        ("pipeline=2,microbatches=1,ddp", script.batchnorm_model, script.plain_loss, synced),
        ("pipeline=2,schedule=naive,zero1", script.batchnorm_model, script.plain_loss, synced),
    ]
    for lines in check_equal(4, cases):
        assert not any("BatchNorm" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_global_draws_train_as_on_one_device(ranks: int) -> None:
    cases: list[Case] = [
        ("ddp", script.Noisy, script.noisy_loss, {"draws": "global", **options})
        for options in ({}, {"accumulate": 3})
    ]
    cases += [
        ("zero3", script.Noisy, script.noisy_loss, {"draws": "global", "accumulate": 2}),
        ("recompute,unit=Dropout,ddp", script.Noisy, script.noisy_loss, {"draws": "global"}),
    ]
    for lines in check_equal(ranks, cases):
        assert not any("draws" in line for line in lines)


def refusals() -> None:
    """Run on two ranks; each script is refused on both."""

    def refused(strategy: str, make_loss: Any, message: str, **options: Any) -> None:
        with pytest.raises(ShoalError, match=message):
            script.trained(strategy, script.batchnorm_over_space(), make_loss, **options)

    gathering = script.whole_contrastive_loss
    refused("ddp", script.gathered_twice_loss, "follow from rows", accumulate=4)
    refused("ddp", gathering, "draws for one batch", accumulate=4, draws="global")
    refused("local=2", gathering, "different weights")
    refused("diloco=2", gathering, "different weights")
    refused("local=2", script.plain_loss, "sync_batchnorm=True needs", sync_batchnorm=True)
    refused("local=2", script.noisy_loss, 'draws="global" needs ranks', draws="global")
    refused("ddp", script.permuting_loss, "no mean over samples", draws="global")
    refused("ddp", script.loss_of_ones_own_batch, "must know which rows", draws="global")
    run = script.shoal.init(announce=lambda _: None)
    with pytest.raises(ShoalError, match="nothing was gathered yet"):
        _ = run.rows
    model = script.tower()
    loader = script.pairs(7)
    run.prepare(model)
    with pytest.raises(ShoalError, match="inside of evaluate"):
        run.evaluate(lambda x, _z, _y: {"sum": run.gather(model(x)).sum()}, loader)
    # Outside of a step and of an evaluation, rows are gathered at any time.
    assert run.gather(torch.ones(run.rank + 1, 2)).shape == (3, 2)


def test_what_would_not_be_one_global_batch_is_refused() -> None:
    world.run(2, refusals)


def test_there_are_two_kinds_of_draws() -> None:
    with pytest.raises(ConfigError, match='"rank" or "global"'):
        script.shoal.init(draws="local")  # type: ignore[arg-type]


def notes() -> list[list[str]]:
    return [
        script.trained(strategy, make_model(), make_loss, **options)[2]
        for strategy, make_model, make_loss, options in [
            ("ddp", script.Noisy, script.noisy_loss, {}),
            ("zero3", script.Noisy, script.noisy_loss, {}),
            ("ddp", script.tower, script.plain_loss, {}),
            ("ddp", script.batchnorm_over_space, script.plain_loss, {}),
            ("ddp", script.batchnorm_over_space, script.plain_loss, {"sync_batchnorm": True}),
            (
                "ddp",
                script.batchnorm_over_space,
                script.plain_loss,
                {"sync_batchnorm": True, "accumulate": 2},
            ),
        ]
    ]


def test_every_source_of_random_numbers_and_every_layer_of_batch_statistics_is_noted() -> None:
    (noisy, sharded, nothing, apart, together, in_parts), others = world.run(2, notes)
    for lines in (noisy, sharded):
        about_numbers = [line for line in lines if "state_dict" not in line]
        dropout, first_step = (line for line in about_numbers if line.startswith("note: "))
        assert "dropout (drop, ...)" in dropout
        assert "randint in coupled_script.py:" in first_step
        assert "and 3 more): a stream of its own" in first_step
    assert not [line for line in [*nothing, *together] if line.startswith("note: ")]
    assert any("sync_batchnorm=True none between ranks" in line for line in apart)
    assert any("one micro-batch of all ranks at a time" in line for line in in_parts)
    assert others == [[]] * 6  # only the first rank says it


def drawn_outside_of_steps() -> list[Tensor]:
    drawn = []
    for draws in ("rank", "global"):
        script.trained("ddp", script.Noisy(), script.noisy_loss, draws=draws)
        drawn.append(torch.rand(2))
        drawn.append(torch.tensor([script.random.random(), script.np.random.rand()]))
    return drawn


@pytest.mark.slow
def test_loops_draw_apart_on_ranks_of_other_samples_and_decide_alike() -> None:
    one, other = world.run(2, drawn_outside_of_steps)
    for index in (0, 2):
        assert not torch.equal(one[index], other[index])
        assert torch.equal(one[index + 1], other[index + 1])


def drawn_in_a_pipeline() -> list[float]:
    run = script.shoal.init("pipeline=2,microbatches=1", announce=lambda _: None)
    model = script.tower().float()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [torch.rand(()).item(), script.random.random(), float(script.np.random.rand())]


def test_all_stages_of_a_pipeline_draw_the_same_in_the_loop() -> None:
    first, last = world.run(2, drawn_in_a_pipeline)
    assert first == last
