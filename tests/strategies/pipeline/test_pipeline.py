"""A run in a pipeline is the run of one process: losses, norms, measures, evaluation, files, on
every rank.
"""

from pathlib import Path

import pytest
import torch
from pipeline_ranks import alike, half, refusal, train

import shoal
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification.trajectory import Experiment
from tests.harness.in_turn import in_turn
from tests.matrix import cases


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        pytest.param("U-Net", "pipeline=2,schedule=zero-bubble,zero1", 4, marks=pytest.mark.slow),
        pytest.param("lstm", "pipeline=3,schedule=gpipe,microbatches=4", 3, marks=pytest.mark.slow),
        # A stage of the second input alone gives something that does not come from what it
        # receives.
        pytest.param(
            *("two inputs", "pipeline=2,schedule=zero-bubble,cuts=right", 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_rank_sees_what_one_process_sees(name: str, strategy: str, ranks: int) -> None:
    one = train(name, "single")
    for told in world.run(ranks, train, name, strategy):
        alike(one, told)


def test_what_differs_by_design_says_so_before_the_first_step() -> None:
    calls = [(name, "pipeline=2,microbatches=2", 1) for name in ("cnn with BatchNorm", "dropout")]
    for told in world.run(2, in_turn, train, *calls)[0]:
        notes = [line for line in told.summary if line.startswith("note: ")]
        assert any("one micro-batch at a time" in note for note in notes)


@pytest.mark.slow
def test_copies_of_a_tied_weight_stay_equal_and_the_header_says_where_the_cuts_are() -> None:
    told = world.run(2, train, "gpt", "pipeline=2,balance=parameters")[0]
    assert torch.equal(told.weights["head.weight"], told.weights["token_embedding.weight"])
    said = "\n".join(told.summary)
    assert "global batch 10 = 1 data rank x 10; 2 ranks = 2 pipeline x 1 data" in said
    assert "pipeline of 2 ranks, cut before blocks.1: parameters 56 % | 44 %" in said
    assert (
        "1f1b, 10 rows in 5 micro-batches (chosen): stages of equal time would be idle for 17 % of "
        "a step" in said
    )


def places_of_tied_weights(strategy: str, file: Path) -> bool:
    """Return True if a saved file has one tensor for a weight that stands at two places."""
    run = shoal.init(strategy, announce=lambda _: None)
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 4), head)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = run.share(torch.arange(8))
    run.forward_backward(lambda x: torch.nn.functional.cross_entropy(model(x), x), x)
    run.save(file)
    state = torch.load(file, weights_only=True)
    return bool(state["0.weight"].data_ptr() == state["2.weight"].data_ptr())


def test_a_tied_weight_of_two_stages_is_saved_once(tmp_path: Path) -> None:
    assert world.run(2, places_of_tied_weights, "pipeline=2", tmp_path / "model.pt") == [True, True]


def test_a_user_can_name_the_cuts() -> None:
    one = train("gpt", "single")
    strategy = "pipeline=2,schedule=zbv,cuts=blocks.0/blocks.1/head"
    first, second = world.run(2, train, "gpt", strategy)
    alike(one, first)
    alike(one, second)
    assert "cut before blocks.0, blocks.1, head: time" in "\n".join(first.summary)


def test_accumulation_recomputation_and_halves_of_the_backward_pass_go_together() -> None:
    check_strategy(
        "pipeline=2,schedule=zero-bubble,recompute",
        2,
        cases.EXPERIMENTS["TransformerEncoder"],
        accumulate=2,
    )


class Shortcut(torch.nn.Module):
    """The output of `a` is needed by `b`, which saves it, and after `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = torch.nn.Linear(64, 12), torch.nn.Linear(12, 12)
        self.b, self.c, self.head = (
            torch.nn.Linear(12, 12),
            torch.nn.Linear(12, 12),
            torch.nn.Linear(12, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(torch.relu(self.first(x.flatten(1)))))
        output: torch.Tensor = self.head(self.c(self.b(x)) + x)
        return output


@pytest.mark.slow
def test_what_a_stage_sends_may_be_what_its_backward_pass_has_saved() -> None:
    experiment = Experiment(Shortcut, cases.image_loader, torch.nn.functional.cross_entropy)
    check_strategy("pipeline=3,schedule=zero-bubble,cuts=a/c", 3, experiment)


def hooked() -> torch.nn.Module:
    model = cases.mlp()
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3.0,))
    model.register_forward_hook(lambda _, inputs, output: output + inputs[0].flatten(1)[:, :1])
    model.layers[1].register_forward_hook(lambda _, inputs, output: output * 2.0)
    return model


@pytest.mark.slow
def test_hooks_that_change_what_modules_get_and_give_are_called() -> None:
    check_strategy(
        "pipeline=2",
        2,
        Experiment(hooked, cases.image_loader, torch.nn.functional.cross_entropy),
    )


@pytest.mark.slow
def test_bf16_trains_through_the_cuts() -> None:
    losses, _ = half("single", "bf16", 1.0)
    for found, _ in world.run(2, half, "pipeline=2", "bf16", 1.0):
        assert found == pytest.approx(losses, rel=0.05)


@pytest.mark.slow
def test_all_stages_skip_a_step_that_overflowed_on_one() -> None:
    start = cases.mlp
    ranks = world.run(2, half, "pipeline=2,microbatches=2", "fp16", 1e6)
    _, alone = half("single", "fp16", 1e6)
    torch.manual_seed(0)
    fresh = start().state_dict()
    for _, weights in ranks:
        assert all(torch.equal(weights[name], alone[name]) for name in fresh)  # nothing was stepped
        assert all(torch.equal(weights[name], fresh[name]) for name in fresh)


def test_what_a_pipeline_cannot_do_is_refused_with_the_cure() -> None:
    calls = [
        ("pipeline=2,schedule=interleaved,stages=9",),
        ("pipeline=2,cuts=layers.9",),
        ("pipeline=2", True),
    ]
    for stages, cut, compiled in world.run(2, in_turn, refusal, *calls):
        assert "18 stages need 17 places between blocks of the model, and there are 3" in stages
        assert "no module of the model is called 'layers.9'" in cut
        assert "Use compile=False" in compiled
