"""`run.checkpoint`: two lines that let a script go on where it was, with its own objects."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from minimal_script import data, quiet
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader

import shoal
from shoal.errors import CheckpointError, LaunchError, UsageError
from shoal.run.run_checkpoints import put_together, take_apart
from shoal.testing import world
from tests.harness.in_turn import in_turn


def steps(
    strategy: str,
    directory: Path,
    until: int,
    every: int,
    told: list[str] | None = None,
    middle: Callable[[], nn.Module] = lambda: nn.Dropout(0.2),
) -> list[tuple[int, float, float]]:
    """Return (step, loss, learning rate) of each step of a script that goes on where it was."""
    announce = (told if told is not None else []).append
    run = shoal.init(strategy, announce=announce)
    model = nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 8), nn.Linear(8, 3))
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = MultiStepLR(optimizer, [2, 4, 6])
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    checkpoint = run.checkpoint(directory, keep=2, scheduler=scheduler)
    step = checkpoint.resume()
    found = []
    while step < until:
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            scheduler.step()
            step += 1
            found.append((step, loss.item(), scheduler.get_last_lr()[0]))
            if step % every == 0:
                checkpoint.save(step)
            if step == until:
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "tensor=2", "pipeline=2", "zero3"])
def test_a_script_goes_on_bit_for_bit_in_the_middle_of_an_epoch(
    tmp_path: Path, strategy: str
) -> None:
    calls = (strategy, tmp_path / "whole", 7, 100), (strategy, tmp_path / "parts", 5, 2)
    whole, first = world.run(2, in_turn, steps, *calls)[0]
    rest = world.run(2, steps, strategy, tmp_path / "parts", 7, 100)[0]
    assert [first[:4], rest] == [whole[:4], whole[4:]]


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), layer, nn.Flatten())


def test_ranks_of_a_model_draw_alike_after_a_checkpoint_of_ranks_that_did_not(
    tmp_path: Path,
) -> None:
    calls = ("zero3", tmp_path, 4, 4, [], attention), ("tensor=2", tmp_path, 7, 9, [], attention)
    (before, after), other = world.run(2, in_turn, steps, *calls)
    assert [step for step, *_ in before + after] == [*range(1, 8)]
    assert other == [before, after]


def epochs(directory: Path, saved_at: int, until: int) -> list[tuple[int, float]]:
    """Return (epoch, learning rate) at the end of each epoch of four steps."""
    run = shoal.init("single", announce=[].append)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    checkpoint = run.checkpoint(directory, scheduler=scheduler)
    step = checkpoint.resume()
    found = []
    for epoch in range(loader.epoch, 3):
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            step += 1
            if step == saved_at:
                checkpoint.save(step)
            if step == until:
                return found
        scheduler.step()
        found.append((epoch, scheduler.get_last_lr()[0]))
    return found


def test_a_checkpoint_of_the_last_batch_goes_on_with_the_end_of_its_epoch(tmp_path: Path) -> None:
    of_an_epoch = -(-len(data()) // 4)
    whole = epochs(tmp_path / "whole", saved_at=0, until=0)
    before = epochs(tmp_path / "parts", saved_at=2 * of_an_epoch, until=2 * of_an_epoch)
    assert before + epochs(tmp_path / "parts", saved_at=0, until=0) == whole


def test_the_newest_checkpoints_stay_and_a_start_says_which_one_it_took(tmp_path: Path) -> None:
    steps("single", tmp_path, 6, 1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000005",
        "step-00000006",
    ]
    told: list[str] = []
    assert steps("single", tmp_path, 6, 1, told) == []
    assert told[-1] == (
        f"resumed from {tmp_path}/step-00000006; the loop over the loader begins behind its batches"
    )


def test_a_checkpoint_that_was_damaged_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    steps("single", tmp_path, 4, 2)
    file = next((tmp_path / "step-00000004").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    told: list[str] = []
    assert [step for step, *_ in steps("single", tmp_path, 4, 100, told)] == [3, 4]
    assert any("step-00000004" in line for line in told)


class Average:
    """A moving average of the script's own, with its state in tensors and numbers."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.count = value, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


def prepared() -> shoal.Run:
    run = quiet()
    model = nn.Linear(4, 3).double()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


def test_an_object_that_comes_later_or_no_longer_is_a_note(tmp_path: Path) -> None:
    average = Average(torch.tensor([1.5, 2.5]))
    average.count = 7
    prepared().checkpoint(tmp_path, average=average).save(3)
    loaded, told = Average(torch.zeros(2)), list[str]()
    run = prepared()
    run._prepared.announce = told.append
    assert run.checkpoint(tmp_path, average=loaded, other=Average(torch.zeros(1))).resume() == 3
    assert (loaded.value.tolist(), loaded.count) == ([1.5, 2.5], 7)
    assert run.checkpoint(tmp_path).resume() == 3
    assert [line for line in told if line.startswith("note")] == [
        "note: the checkpoint holds no state of other",
        "note: the checkpoint's state of average is unused: "
        "run.checkpoint(..., average=...) takes it",
    ]


def test_numbers_of_a_dict_are_saved_and_taken_up(tmp_path: Path) -> None:
    best: dict[str, object] = {"accuracy": 0.5, "epoch": 3}
    prepared().checkpoint(tmp_path, best=best).save(3)
    resumed: dict[str, object] = {"accuracy": 0.0}
    assert prepared().checkpoint(tmp_path, best=resumed).resume() == 3
    assert resumed == best
    with pytest.raises(UsageError, match=r"best is a float, without state_dict.*or a dict of num"):
        prepared().checkpoint(tmp_path, best=0.5)


def save_own_average(directory: Path) -> None:
    run = prepared()
    run.checkpoint(directory, average=Average(torch.full((2,), float(run.rank)))).save(1)


def test_an_object_that_differs_between_ranks_is_refused_on_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="the state of average is not the same on all ranks"):
        world.run(2, save_own_average, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "value is a int, without state_dict"),
        (Average(lambda: 1), r"value\.value of its state_dict\(\) is a function"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place(
    tmp_path: Path, value: Any, message: str
) -> None:
    run = prepared()
    with pytest.raises(UsageError, match=message):
        run.checkpoint(tmp_path, value=value).save(1)
    assert list(tmp_path.iterdir()) == []


class Slow(torch.optim.SGD):
    """Has a number in its state_dict that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": 1}


class Outer(torch.optim.SGD):
    """Saves the state of an optimizer inside of it, and none of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([*params], lr, momentum=0.9)
        self.inner = torch.optim.SGD(self.param_groups, lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def test_an_optimizer_with_state_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    run, model = quiet(), nn.Linear(4, 3).double()
    run.prepare(model, Slow(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"Slow.state_dict\(\) has slow, which a checkpoint"):
        run.checkpoint(tmp_path)
    run, model = quiet(), nn.Linear(4, 3).double()
    model, optimizer = run.prepare(model, Outer(model.parameters(), lr=0.1))
    checkpoint = run.checkpoint(tmp_path)
    run.forward_backward(lambda x: model(x).square().mean(), torch.ones(2, 4).double())
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"Outer.state_dict\(\) has momentum_buffer"):
        checkpoint.save(1)
    assert list(tmp_path.iterdir()) == []


def test_other_parameter_groups_than_the_saved_ones_are_refused(tmp_path: Path) -> None:
    def with_groups(separate: int) -> shoal.Run:
        run, model = quiet(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
        first, *others = model.parameters()
        groups = [{"params": [p]} for p in others[:separate]]
        rest = {"params": [first, *others[separate:]]}
        run.prepare(model, torch.optim.SGD([*groups, rest], lr=0.1))
        return run

    with_groups(1).checkpoint(tmp_path).save(1)
    assert with_groups(1).checkpoint(tmp_path).resume() == 1
    for separate in (0, 2):
        run = with_groups(separate)
        before = run.weights()
        words = rf"settings of 2 parameter groups, and there are {separate + 1} here"
        with pytest.raises(CheckpointError, match=words):
            run.checkpoint(tmp_path).resume()
        assert all(torch.equal(value, before[name]) for name, value in run.weights().items())


def test_nothing_saved_begins_at_zero_and_nothing_good_is_an_error(tmp_path: Path) -> None:
    run = prepared()
    assert run.checkpoint(tmp_path / "new").resume() == 0
    path = run.checkpoint(tmp_path).save(1)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError):
        run.checkpoint(tmp_path).resume()


def test_the_states_of_torchs_schedulers_come_back_equal() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    each = [
        MultiStepLR(optimizer, [3, 3, 5]),
        ReduceLROnPlateau(optimizer),
        LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        SequentialLR(
            optimizer, [MultiStepLR(optimizer, [2]), MultiStepLR(optimizer, [4])], milestones=[3]
        ),
    ]
    for scheduler in each:
        tensors: dict[str, Tensor] = {}
        state = scheduler.state_dict()
        again = put_together(take_apart(state, "scheduler", tensors), tensors)
        assert again == state
    assert isinstance(put_together(take_apart(Counter({3: 2}), "c", {}), {}), Counter)


def test_a_state_as_one_dict_makes_the_same_run() -> None:
    run = prepared()
    state = run.state_dict()
    before = run.weights()
    with torch.no_grad():
        for parameter in run.parameters().values():
            parameter.zero_()
    run.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
    with pytest.raises(UsageError, match="load_state: tensors is a NoneType"):
        run.load_state_dict({})


def test_rates_and_pairs_of_numbers_in_optimizer_groups_come_back_with_the_state() -> None:
    def adam() -> tuple[shoal.Run, torch.optim.Optimizer]:
        run, model = quiet(), nn.Linear(4, 3).double()
        return run, run.prepare(model, torch.optim.AdamW(model.parameters()))[1]

    (run, optimizer), (again, other) = adam(), adam()
    optimizer.param_groups[0].update(lr=0.025, betas=(0.8, 0.99))  # as OneCycleLR does
    again.load_state(*run.state())
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.025, (0.8, 0.99))
