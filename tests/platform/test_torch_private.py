"""Each private name of torch that Shoal stands on does what shoal/platform/torch_private says of
it.

An upgrade of torch that takes a name away, or gives it another meaning, fails here with that name.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backend_checks
import dispatcher_checks
import module_checks
import pytest
import rank_checks
import subclass_checks
import tensor_checks
import torch

import shoal.platform.torch_private

HOME = Path(shoal.platform.torch_private.__file__).parent
CHECKS: dict[str, Callable[[Any], bool]] = (
    tensor_checks.CHECKS
    | module_checks.CHECKS
    | rank_checks.CHECKS
    | subclass_checks.CHECKS
    | dispatcher_checks.CHECKS
    | backend_checks.CHECKS
)


def given_names() -> list[str]:
    """All names that torch_private gives, as module.name."""
    found = []
    for path in sorted(HOME.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found.append(f"{path.stem}.{node.name}")
            elif isinstance(node, ast.AnnAssign):
                found.append(f"{path.stem}.{ast.unparse(node.target)}")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += [f"{path.stem}.{name}" for name in ast.literal_eval(node.value)]
            elif isinstance(node, ast.Assign):
                found.append(f"{path.stem}.{ast.unparse(node.targets[0])}")
    return found


@pytest.mark.parametrize("name", given_names())
def test_a_name_does_in_this_torch_what_is_said_of_it(name: str) -> None:
    module, _, member = name.partition(".")
    assert name in CHECKS, f"write a check of shoal.platform.torch_private.{name}"
    needs = f"shoal.platform.torch_private.{name}, which stands on a private name of torch,"
    try:
        found = getattr(importlib.import_module(f"shoal.platform.torch_private.{module}"), member)
        holds = CHECKS[name](found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said with name and version
        pytest.fail(f"{needs} does not work with torch {torch.__version__}: {error!r}")
    assert holds, f"{needs} does something else in torch {torch.__version__}"


def test_no_check_is_left_of_a_name_that_is_gone() -> None:
    assert CHECKS.keys() - given_names() == set()
