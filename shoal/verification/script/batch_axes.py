"""Which ranks compute on the same samples: tensor groups, the stages of a pipeline, or an error.

rank 0   rows 0-3   embed, block 0      ─┐ one batch, other modules: stages
rank 1   rows 0-3   block 1, head       ─┘
rank 0   rows 0-3   all modules         ─┐ one batch, the same outputs, no message on the way:
rank 1   rows 0-3   all modules         ─┘ nothing shares the samples out
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.verification.script.run_record import (
    RankRecord,
    tensors_of_batch,
    tensors_of_step,
)


def _first_batches(folder: Path, ranks: Sequence[RankRecord]) -> list[list[Any]]:
    """Return for each rank the tensors of the first batch of each loader."""
    loops = list(dict.fromkeys(loop for record in ranks for loop in record.loaders))
    columns = [batches_of_ranks(folder, ranks, f"{loop}-0") for loop in loops]
    return [[t for column in columns for t in column[rank] or ()] for rank in range(len(ranks))]


def axes_of_batches(folder: Path, ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return for each rank its axes: ranks of the same batches are a tensor group.

    The first batch of each loader counts, and what the first step gives to the model, for scripts
    that take batches from elsewhere. The stages of a pipeline are one group: they take one batch
    and call different modules, each on what another one has sent.
    """
    taken = _first_batches(folder, ranks)
    groups: list[list[int]] = []
    for rank, record in enumerate(ranks):
        for members in groups:
            other = ranks[members[0]]
            is_stage = bool(taken[rank]) and are_stages(record, other)
            if equal(taken[rank], taken[members[0]]) and (
                is_stage or equal(inputs(record), inputs(other))
            ):
                members.append(rank)
                break
        else:
            groups.append([rank])
    axes: list[dict[str, Any]] = [{} for _ in ranks]
    for index, members in enumerate(groups):
        for place, rank in enumerate(members):
            axes[rank] = {"data": (index, len(groups)), "tensor": (place, len(members))}
    return axes


def are_stages(one: RankRecord, other: RankRecord) -> bool:
    """Return True if the first step calls no module on both of two ranks."""
    called = [{c.module for c in r.steps[0].calls} - {""} for r in (one, other) if r.steps]
    return len(called) == 2 and all(called) and called[0].isdisjoint(called[1])


def inputs(record: RankRecord, step: int = 1) -> list[Tensor]:
    """Return numbers that tell apart what a step gives to the model."""
    digests = record.steps[step - 1].digests if len(record.steps) >= step else {}
    return [torch.tensor(value) for name, value in digests.items() if name.startswith("input/")]


def batches_of_ranks(
    folder: Path, ranks: Sequence[RankRecord], key: str
) -> list[list[Tensor] | None]:
    """Return the tensors of one batch on each rank; None where a rank took none."""
    found: list[list[Tensor] | None] = []
    for record in ranks:
        tensors = tensors_of_batch(folder, record.rank, key)
        found.append([tensors[name] for name in sorted(tensors.names, key=int)] or None)
    return found


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return True if two lists hold equal tensors of the same dtypes."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _have_same_inputs(ranks: Sequence[RankRecord]) -> bool:
    """Return True if the model of each rank is given the same in all common steps."""
    numbers = range(1, min(len(record.steps) for record in ranks) + 1)
    given = [inputs(ranks[0], number) for number in numbers]
    return bool(given[0]) and all(
        equal(inputs(record, number), given[number - 1])
        for record in ranks[1:]
        for number in numbers
    )


def repeat_samples(folder: Path, ranks: Sequence[RankRecord]) -> bool:
    """Return True if all ranks compute the same outputs of the same samples, each on its own.

    Ranks of a tensor group compute the same samples too, but send messages while they do.
    """
    if len(ranks) < 2 or not all(record.steps for record in ranks):
        return False
    if any(step.collectives != 0 for record in ranks for step in record.steps):
        return False
    if not _have_same_inputs(ranks):
        return False
    outputs = [_outputs(folder, record) for record in ranks]
    return bool(outputs[0]) and all(
        names == outputs[0].keys() and all(other[n].equal(outputs[0][n]) for n in names)
        for other in outputs[1:]
        for names in [other.keys()]
    )


def _outputs(folder: Path, record: RankRecord) -> dict[str, Tensor]:
    return tensors_of_step(folder, record.rank, 1).below("forward")
