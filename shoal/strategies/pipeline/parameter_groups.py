"""The groups of parameters between the two halves of a backward pass.

torch notes for each group of parameters the nodes of the graph between them and the loss, with the
gradients that have reached these nodes. Where parts of one parameter go separate ways, as queries
and keys of a cross attention do, a parameter may be in two groups, or in one: that follows from the
order of a set, thus from addresses in memory. It must be in one: each group adds to its gradient,
and ranks of a tensor group exchange gradients in the order of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge


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


def add_weight_gradients(groups: Sequence[dict[str, Any]]) -> None:
    """Compute the gradients of each group's parameters, and add them to `.grad`.

    torch's own `stage_backward_weight` counts a module that is called twice too often before torch
    2.13: the node of one call may lie behind that of the other, which has its gradient already.

    Args: groups: disjoint; they keep their part of the graph.
    """
    for group in groups:
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        with ExitStack() as stack:
            for node, of_node in zip(group["intermediates"], group["grads"], strict=True):
                # Whatever else flows into this node is a part of what it got in the first half.
                hook = node.register_prehook(lambda _, of_node=of_node: of_node)
                stack.callback(hook.remove)
                for index, gradient in enumerate(of_node):
                    if gradient is not None:
                        edges.append(GradientEdge(node, index))
                        gradients.append(gradient)
            if not edges:
                continue
            # The graph stays: weights before a cross attention share a part of their way.
            accumulators = list(group["params"])
            found = torch.autograd.grad(
                edges,
                [GradientEdge(node, 0) for node in accumulators],
                grad_outputs=gradients,
                retain_graph=True,
            )
        for node, gradient in zip(accumulators, found, strict=True):
            weight = node.variable
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
