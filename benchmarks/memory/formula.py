"""The bytes of states that a rank should hold, from the shapes of the model's parameters alone.

    parameters  4 each
    gradients   4 each
    optimizer   AdamW      8 for each parameter: two moments
                AdamW8bit  2 for each, 4 for each block and moment, 1,024 for the map of each
                           moment; 8 for each of those that stay in full precision
                Adafactor  4 for each row and each column of a matrix, 4 for each entry of a vector

Shards are cut along dimension 0 and rounded up. AdamW's count of steps, 4 bytes a parameter tensor,
is left out."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Size, nn

from benchmarks.memory.cases import Case, gpt
from shoal.optim.adamw8bit import AdamW8bit

MAP_ENTRIES = 256


def expected(case: Case, ranks: int) -> dict[str, int]:
    """Bytes on the fullest of `ranks`, where the case is not refused."""
    model, parts = gpt(), ranks if "zero" in case.strategy else 1
    parameters = list(model.parameters())
    return {
        "parameters": 4 * _numel(parameters, parts),
        "gradients": 4 * _numel(parameters, parts),
        "optimizer": _optimizer(case.optimizer, model, parts),
    }


def _optimizer(name: str, model: nn.Module, parts: int) -> int:
    parameters = list(model.parameters())
    if name == "AdamW":
        return 8 * _numel(parameters, parts)
    if name == "Adafactor":
        return sum(4 * _means(parameter.shape) for parameter in parameters)
    optimizer = AdamW8bit(parameters)
    return sum(2 * _moment(p, optimizer.block_length(p.shape), parts) for p in parameters)


def _moment(parameter: nn.Parameter, block_length: int | None, parts: int) -> int:
    """Bytes of one moment of AdamW8bit."""
    numel = _numel([parameter], parts)
    return (
        4 * numel if block_length is None else numel + 4 * (numel // block_length) + 4 * MAP_ENTRIES
    )


def _means(shape: Size) -> int:
    """Numbers that Adafactor keeps for a parameter."""
    return (
        shape.numel() if len(shape) < 2 else shape.numel() // shape[-1] + shape.numel() // shape[-2]
    )


def _numel(parameters: Iterable[nn.Parameter], parts: int) -> int:
    """Numbers of the largest share."""
    return sum(-(-p.shape[0] // parts) * (p.numel() // p.shape[0]) for p in parameters)
