"""The files that docs/design.md lists for a batch's walk are those that a step really enters."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.testing import world

PACKAGE = Path(shoal.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
DECIDING = ("run/", "strategies/", "parameter_server/worker/")
HELPERS = {
    *("run/checks.py", "run/gradients.py"),
    *("run/prepared.py", "run/parameter_hooks.py"),
    *("run/local_shard_step.py", "run/guards/shard_functions.py"),
    *("run/nonfinite_steps.py", "strategies/grad_checks.py"),
    *("run/guards/guards.py", "run/guards/guarded_models.py"),
    "strategies/base.py",
    "strategies/pipeline/meta_call.py",
    *("strategies/full_model.py", "strategies/module_snapshot.py"),
    *("run/guards/absent_values.py", "run/state_access.py"),
    "parameter_server/worker/flat_params.py",
}
"""Files that a step calls on its way and leaves at once. They decide nothing about the batch."""


def listed(title: str) -> list[str]:
    """Return the files of a walk, as docs/design.md lists them."""
    section = PAGE.partition("## A batch's walk\n")[2].partition("\n## ")[0]
    parts = [section.partition(f"### {part}\n")[2] for part in ("Every step", title)]
    walk = "\n".join(part.partition("\n### ")[0] for part in parts)
    return re.findall(r"^\d+\. `([\w/]+\.py)`: ", walk, flags=re.M)


def files_entered(strategy: str, guards: bool = False) -> list[str]:
    """Return the files of the package that the third step enters, in the order of first calls."""
    run = shoal.init(strategy, announce=lambda _: None, guards=guards)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.setdefault(path.relative_to(PACKAGE).as_posix())

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def step() -> None:
        run.forward_backward(compute_loss, torch.randn(4, 8), torch.arange(4))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return list(entered)


@pytest.mark.parametrize(
    ("title", "strategy"),
    [("ddp", "ddp"), ("zero3", "zero3"), ("server", "server=1"), ("pipeline", "pipeline=2")],
)
def test_a_step_enters_the_files_of_the_walk_in_their_order(title: str, strategy: str) -> None:
    walk = listed(title)
    assert walk
    entered = world.run(2, files_entered, strategy)[-1]  # the last stage has the loss
    assert [file for file in entered if file in walk] == walk
    deciding = {file for file in entered if file.startswith(DECIDING)}
    assert deciding - set(walk) <= HELPERS


@pytest.mark.parametrize("strategy", ["ddp", "server=1"])
def test_what_guards_add_to_a_step_hangs_on_the_seam_of_checks(strategy: str) -> None:
    alone, checked = (world.run(2, files_entered, strategy, guards)[0] for guards in (False, True))
    seam = PAGE.partition("### The checks on the seam\n")[2].partition("\n## ")[0]
    asked = set(re.findall(r"`(run/[\w/]+\.py)`", seam))
    added = {file for file in checked if file.startswith(DECIDING)} - {*alone}
    assert added
    assert added <= asked


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE)) - {"utils.py"}
    paths = [path.as_posix() for path in PACKAGE.parent.rglob("*.py") if ".venv" not in path.parts]
    assert [name for name in sorted(named) if not any(p.endswith(f"/{name}") for p in paths)] == []
