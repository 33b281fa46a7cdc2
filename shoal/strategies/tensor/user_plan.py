"""The user's own plan: `blocks.*.up:column+blocks.*.down:row`, patterns of names and how what they
match is cut.

A row layer belongs to the column layers that are nearest to it: those in the innermost module that
holds both. What lies between them is the user's word, so the first forward pass of that module is
compared with that of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shoal.errors import StrategyRefused
from shoal.strategies.tensor.heads import AttentionPlan, counts_of
from shoal.strategies.tensor.hooks import hooked_between
from shoal.strategies.tensor.pairs import CONVOLUTIONS, LINEAR, Candidates, width_in, width_out


def matching(model: nn.Module, pattern: str, problems: list[str]) -> list[str]:
    """Names of modules, not empty unless a problem is added."""
    found = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
    if not found:
        problems.append(f"'{pattern}' matches no module of the model")
    return found


def apply_user_plan(
    model: nn.Module, own: Sequence[tuple[str, str]], modules: Candidates
) -> list[AttentionPlan]:
    """What patterns of names, each with "column" or "row", ask to be cut. Raises
    StrategyRefused with every problem.
    """
    how = _how(model, own, modules)
    columns = [name for name, kind in how.items() if kind == "column"]
    pairs = {row: _nearest(row, columns) for row, kind in how.items() if kind == "row"}
    _refuse(
        [*_alone(columns, pairs), *_claimed_twice(columns, pairs), *_looked_into(pairs, modules)]
    )
    return [_heads(region, taken, row, modules) for row, (region, taken) in pairs.items()]


Pairs = Mapping[str, tuple[str, list[str]]]
"""Row layer -> the innermost module that holds it and column layers, and these column layers."""


def _how(model: nn.Module, own: Sequence[tuple[str, str]], modules: Candidates) -> dict[str, str]:
    """Map the name of each layer to "column" or "row".

    Raises: StrategyRefused: with every layer that cannot be cut so.
    """
    problems: list[str] = []
    how: dict[str, str] = {}
    for pattern, kind in own:
        for name in matching(model, pattern, problems):
            if how.setdefault(name, kind) != kind:
                problems.append(f"{name} is to be column and row at once")
    problems += [
        problem for name, kind in how.items() if (problem := _problem(name, kind, modules))
    ]
    _refuse(problems)
    return how


def _alone(columns: Sequence[str], pairs: Pairs) -> Iterator[str]:
    """Layers that belong to no other."""
    used = {column for _, taken in pairs.values() for column in taken}
    for column in columns:
        if column not in used:
            yield f"{column} is cut by columns, and no row layer takes its slices"
    for row, (_, taken) in pairs.items():
        if not taken:
            yield f"{row} is cut by rows, and no column layer gives it slices"


def _claimed_twice(columns: Sequence[str], pairs: Pairs) -> Iterator[str]:
    """Column layers that more than one row layer would take."""
    for column in columns:
        rows = [row for row, (_, taken) in pairs.items() if column in taken]
        if len(rows) > 1:
            yield (
                f"{column} may belong to {' or to '.join(rows)}, all in one module: put each pair "
                "into a module of its "
                "own, or leave out cut_by, and pairs are found by what the model does"
            )


def _looked_into(pairs: Pairs, modules: Candidates) -> Iterator[str]:
    """Pairs between whose layers somebody else looks: hooks, or a pipeline."""
    for row, (region, taken) in pairs.items():
        if (seen := hooked_between(region, (*taken, row), modules.by_name)) is not None:
            yield (
                f"hooks of {seen} would see a slice between {row} and its columns: take them off, "
                "or leave the pair "
                "whole"
            )
    for row, (region, _) in pairs.items():
        if modules.uncut is not None and not modules.uncut.stages_running(region):
            yield (
                f"{region or 'the model'} holds {row} and its columns, and the pipeline looks into "
                "it: name pairs "
                "inside one of its blocks, or leave out pipeline"
            )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise StrategyRefused("tensor: cut: " + "\n  ".join(problems))


def _problem(name: str, kind: str, modules: Candidates) -> str:
    module = modules.by_name[name]
    if (
        not modules.may_be_cut(module, (*LINEAR, *CONVOLUTIONS))
        or getattr(module, "groups", 1) != 1
    ):
        kinds = "Linear and convolutions without hooks, used in one place"
        return f"{name} is a {type(module).__name__}; what can be cut are {kinds}"
    width = width_out(module) if kind == "column" else width_in(module)
    if width % modules.degree:
        return f"{name} has {width} {'outputs' if kind == 'column' else 'inputs'}, no multiple of {modules.degree}"
    return ""


def _nearest(row: str, columns: list[str]) -> tuple[str, list[str]]:
    """The innermost module with both, and its columns."""
    words = row.split(".")[:-1]
    for depth in range(len(words), -1, -1):
        region = ".".join(words[:depth])
        inside = [name for name in columns if not region or name.startswith(f"{region}.")]
        if inside:
            return region, inside
    return "", []


def _heads(region: str, columns: list[str], row: str, modules: Candidates) -> AttentionPlan:
    owner: Any = modules.by_name[region]
    return AttentionPlan(
        region, tuple(columns), row, region, counts_of(owner, width_in(modules.by_name[row])), 1
    )
