"""Every strategy is a `Strategy` with the declared members; mypy checks their kinds."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from shoal.strategies import STRATEGIES, options
from shoal.strategies.base import Strategy
from shoal.strategies.transforms.accumulate import Accumulate
from shoal.strategies.transforms.compile import Compile
from shoal.strategies.transforms.precision import Precision

STRATEGY_CLASSES = [
    *(
        getattr(import_module(f"shoal.strategies.{file}"), name)
        for file, _, name in (known.class_path.partition(":") for known in STRATEGIES.values())
    ),
    Accumulate,
    Compile,
    Precision,
]
MISSPELLED = """
from shoal.comm.mesh import Mesh
from shoal.strategies.base import LocalModel, Strategy

class Mine(Strategy):
    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        return model

    @property
    def deviations(self) -> str:
        return ""

def notes_of(strategy: Strategy) -> list[str]:
    return strategy.remarks
"""


@pytest.mark.parametrize("kind", STRATEGY_CLASSES, ids=lambda kind: kind.__name__)
def test_every_strategy_derives_from_the_contract(kind: type) -> None:
    assert issubclass(kind, Strategy)
    assert not inspect.isabstract(kind)


@pytest.mark.parametrize("kind", STRATEGY_CLASSES, ids=lambda kind: kind.__name__)
def test_public_members_of_a_strategy_are_declared_or_are_options(
    kind: type,
) -> None:
    declared = {name for base in Strategy.__mro__ for name in vars(base)}
    fields = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    of_options = {
        name for base in kind.__mro__ if base.__module__ == options.__name__ for name in vars(base)
    }
    public = {name for name in vars(kind) if not name.startswith("_")}
    assert public <= declared | fields | of_options


@pytest.mark.slow
def test_mypy_finds_a_misspelled_member_of_a_strategy(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MISSPELLED)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)], capture_output=True, text=True
    )
    assert 'Signature of "deviations" incompatible' in found.stdout
    assert 'has no attribute "remarks"' in found.stdout
