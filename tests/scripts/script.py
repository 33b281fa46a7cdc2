"""A script of the catalog: the same training in plain PyTorch and with Shoal."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.data.seeds import derive_seed

Result = tuple[list[Any], Mapping[str, Tensor]]
"""The loss of every step, and the weights after the last one."""

IMPORT_AND_INIT = 2
"""`import shoal` and `run = shoal.init(...)`, which the harness has in place of each script."""


class Script:
    """A training script.

    Attributes:
        follows: the well-known script after which it is written, in our own words.
        needs: letters of `NEEDS`: what is unusual about it.
        tolerance: the relative error that counts as exact.
        plain: trains in plain PyTorch on one device.
        with_shoal: is `plain` with the lines changed that Shoal needs; gets the run.
    """

    follows: ClassVar[str]
    needs: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-10
    plain: ClassVar[Callable[[], Result]]
    with_shoal: ClassVar[Callable[[Any], Result]]

    @classmethod
    def lines_of(cls, version: str) -> list[str]:
        """Return the lines of `plain` or `with_shoal`, without its head."""
        lines = textwrap.dedent(inspect.getsource(getattr(cls, version))).splitlines()
        head = next(i for i, line in enumerate(lines) if line.startswith("def "))
        return lines[head + 1 :]


NEEDS = {
    "K": "batches are dicts",
    "M": "several models",
    "O": "several optimizers, or closures",
    "C": "the loss is no plain mean over samples",
    "G": "the loss couples samples",
    "I": "iterable data",
    "S": "state is kept from step to step",
    "X": "calls methods other than forward",
    "D": "gradients inside the loss",
    "R": "draws random numbers in the loop",
    "B": "batch statistics, or buffers that change",
    "E": "outputs are used after the step",
    "A": "accumulates by hand",
    "V": "samples of different sizes",
    "F": "freezes, or trains in phases",
    "W": "touches weights or gradients by hand",
    "T": "a teacher, or an average of weights",
    "N": "no loader",
    "Z": "sparse or indexed gradients",
    "U": "control flow depends on data",
}


def catalog() -> dict[str, type[Script]]:
    """Return all scripts by their name, in the order of the catalog's modules."""
    package = import_module("tests.scripts.catalog")
    scripts = {}
    for module in iter_modules(package.__path__):
        scripts |= _scripts_of(f"{package.__name__}.{module.name}")
    return scripts


def pretrained() -> dict[str, type[Script]]:
    """Return the scripts with models of transformers, which is an extra of the tests."""
    names = ("pretrained", "pretrained_encoders")
    return {k: v for name in names for k, v in _scripts_of(f"tests.scripts.{name}").items()}


def script_named(name: str) -> type[Script]:
    """Return a script; those of transformers are looked up without the others."""
    if name.startswith("Hf"):
        return pretrained()[name]
    return catalog().get(name) or loops()[name]


def loops() -> dict[str, type[Script]]:
    """Return scripts that leave out what Shoal must be told: what a check has to find."""
    return _scripts_of("tests.ablation.loops")


def _scripts_of(module: str) -> dict[str, type[Script]]:
    """Return the scripts of a module, without those that it imports."""
    return {
        name: member
        for name, member in vars(import_module(module)).items()
        if isinstance(member, type) and issubclass(member, Script) and member.__module__ == module
    }


def lines_changed(script: type[Script]) -> int:
    """Return how many lines of the plain script are changed, added or removed with Shoal."""
    before, after = (_body(script.lines_of(version)) for version in ("plain", "with_shoal"))
    blocks = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal")
    return changed + IMPORT_AND_INIT


def _body(lines: list[str]) -> list[str]:
    """Return the lines of a function without the seed and what it hands the harness.

    Indentation does not count: a loss that moves into a function keeps its lines.
    """
    stripped = [line.partition("  # ")[0].strip() for line in lines]
    harness = ("return losses", "draw_as_rank_0", "if cls.draws", "#")
    return [line for line in stripped if line and not line.startswith(harness)]


def draw_as_rank_0() -> None:
    """Seed torch as `prepare` does on rank 0, so that one rank draws as the plain script."""
    torch.manual_seed(derive_seed(0, 0))


def weights(*models: nn.Module) -> dict[str, Tensor]:
    """Return what `run.weights()` gives after `prepare(*models, ...)`."""
    if len(models) == 1:
        return dict(models[0].state_dict())
    return dict(nn.ModuleDict({f"model{i}": m for i, m in enumerate(models)}).state_dict())
