"""What a run gives to be kept, and takes back: weights in a file, state, and modules in the
mode that they had.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from minimal_script import data, parts, quiet
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised


def test_saved_weights_load_without_pickle_and_leave_no_partial_file(tmp_path: Path) -> None:
    run = quiet()
    model, _, _ = run.prepare(*parts())
    run.save(tmp_path / "deep" / "model.pt")
    loaded = torch.load(tmp_path / "deep" / "model.pt", weights_only=True)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.pt"]


def test_state_given_back_makes_the_same_next_steps() -> None:
    def steps(
        run: shoal.Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: object,
        count: int,
    ) -> list[float]:
        losses = []
        while len(losses) < count:
            for x, y in loader:  # type: ignore[attr-defined]
                optimizer.zero_grad()
                losses.append(run.forward_backward(supervised(F.cross_entropy, model), x, y).item())
                optimizer.step()
                if len(losses) == count:
                    break
        return losses

    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    run = quiet()
    prepared = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), parts()[2])
    for x, y in prepared[2]:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        prepared[1].step()
        tensors, info, private = run.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        break
    expected = steps(run, *prepared, count=2)
    other = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    again = quiet()
    prepared = again.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.1), parts()[2])
    again.load_state(tensors, info, private)
    # Leaving the loop early ended that epoch for the first run; the second goes on in the middle of
    # it.
    assert prepared[2].state_dict() == {"epoch": 0, "position": 4}
    prepared[2].load_state_dict({"epoch": 1, "position": 0})
    assert steps(again, *prepared, count=2) == expected


def test_a_schedulers_rate_comes_back_with_the_state() -> None:
    run, again = quiet(), quiet()
    _, optimizer, _ = run.prepare(*parts())
    optimizer.param_groups[0]["lr"] = 0.025
    _, other, _ = again.prepare(*parts())
    again.load_state(*run.state())
    assert other.param_groups[0]["lr"] == 0.025


def test_pairs_of_numbers_in_optimizer_groups_come_back_with_the_state() -> None:
    def adam() -> tuple[shoal.Run, torch.optim.Optimizer]:
        run, model = quiet(), nn.Linear(4, 3).double()
        return run, run.prepare(model, torch.optim.AdamW(model.parameters()))[1]

    (run, optimizer), (again, other) = adam(), adam()
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)  # as OneCycleLR does
    again.load_state(*run.state())
    assert other.param_groups[0]["betas"] == (0.8, 0.99)


def test_an_evaluation_leaves_every_module_in_the_mode_that_it_had() -> None:
    run = quiet()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model[0].eval()
    found = run.evaluate(
        lambda x, y: {"ones": (y >= 0).sum()}, DataLoader(data(), batch_size=4), model
    )
    assert found == {"samples": 10.0, "ones": 10.0}
    assert [module.training for module in model.modules()] == [True, False, True]
