"""The user's own plan, such as `blocks.*.up:column+blocks.*.down:row`.

A row layer belongs to the nearest column layers: those in the innermost module that contains both
the row layer and column layers. The code between them is not examined. So the first forward pass
of this module is compared with that of the full model, as for attention (`heads.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from shoal.errors import StrategyRefused
from shoal.strategies.tensor.candidates import (
    CONVOLUTIONS,
    LINEAR,
    Candidates,
    find_hooks_around,
    width_in,
    width_out,
)
from shoal.strategies.tensor.find_attention import AttentionPlan, head_count_attributes


class NearestColumns(NamedTuple):
    """The column layers of one row layer."""

    region: str  # name of the innermost module that contains them and the row layer
    columns: list[str]


NearestByRow = Mapping[str, NearestColumns]
"""Name of each row layer -> its column layers."""


def match_modules(model: nn.Module, pattern: str, problems: list[str]) -> list[str]:
    """Return names of modules that match a shell pattern; none is a problem, which is added."""
    names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
    if not names:
        problems.append(f"'{pattern}' matches no module of the model")
    return names


def apply_user_plan(
    model: nn.Module, patterns: Sequence[tuple[str, str]], candidates: Candidates
) -> list[AttentionPlan]:
    """Return what the patterns ask for, one plan for each row layer.

    Args:
        patterns: patterns of names, each with "column" or "row".

    Raises:
        StrategyRefused: with every problem of the patterns.
    """
    styles = _styles_by_layer(model, patterns, candidates)
    columns = [name for name, style in styles.items() if style == "column"]
    rows = [name for name, style in styles.items() if style == "row"]
    nearest = {row: _nearest_columns(row, columns) for row in rows}
    _check_none(
        [
            *_unpaired_layers(columns, nearest),
            *_ambiguous_columns(columns, nearest),
            *_observed_pairs(nearest, candidates),
        ]
    )
    return [_plan_region(row, *nearest[row], candidates) for row in rows]


def _styles_by_layer(
    model: nn.Module, patterns: Sequence[tuple[str, str]], candidates: Candidates
) -> dict[str, str]:
    """Map the name of each layer to "column" or "row".

    Raises:
        StrategyRefused: with every layer that cannot be divided so.
    """
    problems: list[str] = []
    styles: dict[str, str] = {}
    for pattern, style in patterns:
        for name in match_modules(model, pattern, problems):
            if styles.setdefault(name, style) != style:
                problems.append(f"{name} is to be column and row at once")
    for name, style in styles.items():
        problem = _layer_problem(name, style, candidates)
        if problem:
            problems.append(problem)
    _check_none(problems)
    return styles


def _layer_problem(name: str, style: str, candidates: Candidates) -> str:
    """Return why a layer cannot be divided in this style; empty if it can."""
    module = candidates.by_name[name]
    is_plain = candidates.may_shard(module, (*LINEAR, *CONVOLUTIONS))
    if not is_plain or getattr(module, "groups", 1) != 1:
        kinds = "Linear and convolutions without hooks, used in one place"
        return f"{name} is a {type(module).__name__}; what can be cut are {kinds}"
    is_column = style == "column"
    width = width_out(module) if is_column else width_in(module)
    if width % candidates.degree:
        entries = "outputs" if is_column else "inputs"
        return f"{name} has {width} {entries}, no multiple of {candidates.degree}"
    return ""


def _nearest_columns(row: str, columns: list[str]) -> NearestColumns:
    """Return the column layers in the innermost module that contains the row layer and some."""
    containers = row.split(".")[:-1]
    for depth in range(len(containers), -1, -1):
        region = ".".join(containers[:depth])
        inside = [name for name in columns if not region or name.startswith(f"{region}.")]
        if inside:
            return NearestColumns(region, inside)
    return NearestColumns("", [])


def _unpaired_layers(columns: Sequence[str], nearest: NearestByRow) -> Iterator[str]:
    """Describe column layers without a row layer, and row layers without column layers."""
    paired = {column for _, row_columns in nearest.values() for column in row_columns}
    for column in columns:
        if column not in paired:
            yield f"{column} is cut by columns, and no row layer takes its slices"
    for row, (_, row_columns) in nearest.items():
        if not row_columns:
            yield f"{row} is cut by rows, and no column layer gives it slices"


def _ambiguous_columns(columns: Sequence[str], nearest: NearestByRow) -> Iterator[str]:
    """Describe column layers that are nearest to several row layers."""
    for column in columns:
        rows = [row for row, (_, row_columns) in nearest.items() if column in row_columns]
        if len(rows) > 1:
            yield (
                f"{column} may belong to {' or to '.join(rows)}, all in one module: put each pair "
                "into a module of its own, or leave out cut_by, and pairs are found by what the "
                "model does"
            )


def _observed_pairs(nearest: NearestByRow, candidates: Candidates) -> Iterator[str]:
    """Describe pairs where a hook, or the pipeline, would see a shard between the layers."""
    for row, (region, columns) in nearest.items():
        hooked = find_hooks_around(region, (*columns, row), candidates.by_name)
        if hooked is not None:
            yield (
                f"hooks of {hooked} would see a slice between {row} and its columns: take them "
                "off, or leave the pair whole"
            )
    full_model = candidates.full_model
    for row, (region, _) in nearest.items():
        if full_model is not None and not full_model.runs_whole(region):
            yield (
                f"{region or 'the model'} holds {row} and its columns, and the pipeline looks into "
                "it: name pairs inside one of its blocks, or leave out pipeline"
            )


def _check_none(problems: Sequence[str]) -> None:
    if problems:
        raise StrategyRefused("tensor: cut: " + "\n  ".join(problems))


def _plan_region(
    row: str, region: str, columns: list[str], candidates: Candidates
) -> AttentionPlan:
    """Plan one row layer with its columns; the region may be attention, so its counts shrink."""
    counts = head_count_attributes(candidates.by_name[region], width_in(candidates.by_name[row]))
    # No layer is fused here: a pattern does not say how the rows of a matrix belong together.
    return AttentionPlan(
        region,
        columns=tuple(columns),
        row=row,
        owner=region,
        counts=counts,
        fused=1,
        is_asked=True,
    )
