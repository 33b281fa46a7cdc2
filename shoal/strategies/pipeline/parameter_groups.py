"""The groups of parameters between the two halves of a backward pass.

torch notes for each group of parameters the nodes of the graph between them and the loss, with the
gradients that have reached these nodes. Where parts of one parameter go separate ways, as queries
and keys of a cross attention do, a parameter may be in two groups, or in one: that follows from the
order of a set, thus from addresses in memory. It must be in one: each group adds to its gradient,
and ranks of a tensor group exchange gradients in the order of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def disjoint_groups(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups in the order of their parameters, and no parameter in two of them.

    Args:
        groups: of torch's `stage_backward_input`: "params", "intermediates" and "grads".
        parameters: of the stage; their order is the same on all ranks.
    """
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    merged: list[dict[str, Any]] = []
    for group in groups:
        overlapping = [other for other in merged if other["params"] & group["params"]]
        merged = [other for other in merged if not other["params"] & group["params"]]
        for other in overlapping:
            group = _union(group, other)
        merged.append(group)

    def places(group: dict[str, Any]) -> list[int]:
        # The nodes that accumulate into parameters have a `variable`.
        variables = (getattr(node, "variable", None) for node in group["params"])
        return sorted(place.get(id(variable), len(place)) for variable in variables)

    return sorted(merged, key=places)


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    grads = dict(zip(other["intermediates"], other["grads"], strict=True))
    grads |= dict(zip(one["intermediates"], one["grads"], strict=True))
    return {
        "params": one["params"] | other["params"],
        "intermediates": [*grads],
        "grads": [*grads.values()],
    }
