"""The gradients of a synchronous step as the servers have summed them, and their norm."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams


def summed_gradients(
    client: WorkerClient, flat: FlatParams, factor: float, without: Collection[str]
) -> dict[str, Tensor | None]:
    """Return the full gradients by the names of parameters. Waits for all pushes.

    Args:
        factor: of the gradients.
        without: names of parameters whose gradient the step does not use; they have None.
    """
    sums: dict[int, list[dict[str, Any]]] = {}
    for part in client.parts:
        values, present = client.gradient(part.number)
        sums[part.number] = [
            {"sum": values[s.offset : s.offset + s.length] * factor} if has_grad else {}
            for s, has_grad in zip(part.segments, present, strict=True)
        ]
    return {
        name: None if name in without else flat.gather(name, sums).get("sum")
        for name in flat.parameters
    }


def summed_norm(
    client: WorkerClient, flat: FlatParams, factor: float, without: Collection[str]
) -> Tensor:
    """Return the 2-norm of what `summed_gradients` returns, float64. Waits for all pushes."""
    if not without:  # the servers know the squares
        return torch.tensor(client.squared_norm() ** 0.5 * factor, dtype=torch.float64)
    gradients = summed_gradients(client, flat, factor, without).values()
    norms = [g.double().norm() for g in gradients if g is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)
