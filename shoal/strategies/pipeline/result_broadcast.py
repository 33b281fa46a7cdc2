"""The broadcast of a nest of tensors: what the last stage returns, on every rank of a pipeline.

Its structure, and leaves that are no tensors, travel as JSON; tensors in a broadcast each.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.data.tree_map import SPARSE
from shoal.errors import UsageError
from shoal.platform.torch_private.pytree import (
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from shoal.strategies.loss_terms import Summed


def broadcast_nest(axis: Axis, nest: Any, source: int) -> Any:
    """Return the nest of rank `source` on every rank. Collective.

    Raises: UsageError: on that rank, if a leaf is neither a tensor nor a JSON value.
    """
    is_source = axis.rank == source
    leaves, spec = tree_flatten(nest)
    sent = _dumped([treespec_dumps(spec), [*map(_header, leaves)]]) if is_source else ""
    received = next(text for text in axis.all_gather_str(sent) if text)
    spec_text, headers = json.loads(received)
    results: list[Any] = []
    for index, header in enumerate(headers):
        if "is" in header:
            results.append(header["is"])
            continue
        dtype = getattr(torch, header["dtype"])
        tensor = torch.empty(header["shape"], dtype=dtype, device=axis.device)
        if is_source:
            # The copy is a plain tensor, even if the model returns sharded logits.
            value = _tensor_of(leaves[index])
            tensor.copy_(value.to_dense() if value.layout in SPARSE else value)
        dist.broadcast(tensor, group=axis.group, group_src=source)
        layout = getattr(torch, header["layout"])
        tensor = tensor.to_sparse(layout=layout) if layout in SPARSE else tensor
        results.append(Summed(tensor) if header["summed"] else tensor)
    return tree_unflatten(results, treespec_loads(spec_text))


def _tensor_of(leaf: Any) -> Tensor:
    tensor: Tensor = leaf.value if isinstance(leaf, Summed) else leaf
    return tensor


def _header(leaf: Any) -> dict[str, Any]:
    """Return dtype, layout and shape of a tensor, or the value of any other leaf."""
    if not isinstance(leaf, (Tensor, Summed)):
        return {"is": leaf}
    tensor = _tensor_of(leaf)
    dtype, layout = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, tensor.layout))
    shape, summed = [*tensor.shape], isinstance(leaf, Summed)
    return {"dtype": dtype, "layout": layout, "shape": shape, "summed": summed}


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise UsageError(
            f"pipeline: what the function returns beside tensors must be numbers and texts, for "
            f"all ranks to get it: {error}."
        ) from error
