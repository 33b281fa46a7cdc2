"""Putting together what ranks of one line hold of a model, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.norm import to_local


def gather_named_tensors(
    axis: Axis | None, mine: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """All that ranks of the line hold, on each of them; of what several hold, the first one's.
    Collective.

    Args: mine: by whole-model name; whole tensors. A rank sends what is its own, one after the
    other."""
    if axis is None or axis.size == 1:
        return dict(mine)
    found: dict[str, Tensor | None] = {}
    tables = [
        json.loads(text)
        for text in axis.all_gather_str(json.dumps({n: _form(t) for n, t in mine.items()}))
    ]
    for owner, table in enumerate(tables):
        for name, form in table.items():
            if name not in found:
                found[name] = _from(axis, owner, mine.get(name), form)
    return found


def gather_named_values(axis: Axis | None, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The same for JSON values. Collective."""
    if axis is None or axis.size == 1:
        return dict(mine)
    found: dict[str, Any] = {}
    for text in axis.all_gather_str(json.dumps(dict(mine))):
        found = json.loads(text) | found
    return found


def _form(tensor: Tensor | None) -> Any:
    return (
        None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    )


def _from(axis: Axis, owner: int, mine: Tensor | None, form: Any) -> Tensor | None:
    if form is None:
        return None
    dtype, shape = form
    if axis.rank == owner:
        assert mine is not None
        tensor = to_local(mine).detach().to(axis.device).contiguous()
    else:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=axis.device)
    dist.broadcast(tensor, group=axis.group, group_src=owner)
    return tensor
