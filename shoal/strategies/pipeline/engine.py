"""The loop of one rank through its row of the schedule table: receive, compute, send.

      1F1B on rank 1 of 3        post the receives of f1, b0, ... early
      ─────────────────────────────────────────────────────────────────────────────
      receive f0   compute f0   send f0   receive b0   compute b0   send b0   ...

The receive of the next action is posted before this action computes, so that its message travels
meanwhile.

A backward pass is one action (B), or two in the zero-bubble schedules: gradients of inputs (I),
which the stage before waits for, and gradients of weights (W), which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from shoal.costs.pass_table import Action
from shoal.errors import UsageError
from shoal.platform.autograd_graph import nodes_behind
from shoal.strategies.pipeline.p2p import StageComm, message_after, message_before
from shoal.trace.recorder import BACKWARD, FORWARD
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


class StageOutput(NamedTuple):
    """The output of a stage for a micro-batch: values for the next stage; of the last stage the
    objective, a scalar that is differentiated.
    """

    values: tuple[Tensor, ...]
    objective: Tensor | None = None


Compute = Callable[[int, int, tuple[Tensor, ...]], StageOutput]
"""(stage, micro-batch, received values) -> output."""


Roots = list[tuple[Tensor, Tensor | None]]
"""Tensors that are differentiated, with the gradients received for them. A gradient of None stands
for ones: the root is the objective.
"""


class ScheduleExecutor:
    """One step of one rank.

    Args:
        compute: the forward pass of a stage.
        parameters: stage -> the parameters that it uses.
    """

    def __init__(
        self,
        comm: StageComm,
        compute: Compute,
        parameters: Callable[[int], Sequence[nn.Parameter]],
    ) -> None:
        self.table = comm.table
        self.comm = comm
        self.compute = compute
        # Micro-batches between forward and backward pass: received activations, whose `.grad` is
        # sent back, and the stage's output with its graph.
        self._saved: dict[tuple[int, int], tuple[list[Tensor], StageOutput]] = {}
        # W actions to come: roots that do not depend on received activations; parameter groups of
        # torch's `stage_backward_input` for the others.
        self._weight_backwards: dict[tuple[int, int], tuple[Roots, list[dict[str, Any]]]] = {}
        self._has_split_backward = any(
            action.kind == "W" for row in comm.table.rows for action in row
        )
        # The look-up takes as long as a small layer.
        split = comm.table.stages_of(comm.rank) if self._has_split_backward else []
        self._trainable = {s: [p for p in parameters(s) if p.requires_grad] for s in split}

    def run(self) -> Iterator[Action]:
        """Take all actions of this rank. Yield each action when it is done."""
        row = self.table.rows[self.comm.rank]
        recorder = self.comm.link.recorder
        methods: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }
        progress = own_progress()
        for action, following in zip(row, [*row[1:], None], strict=True):
            progress.enter(Phase.FORWARD if action.kind == "F" else Phase.BACKWARD)
            self._prefetch(action)
            if following is not None:
                self._prefetch(following)
            name = f"{action.kind}{action.microbatch} of stage {action.stage}"
            with recorder.during(FORWARD if action.kind == "F" else BACKWARD, name):
                methods[action.kind](action)
            yield action
        self.comm.link.flush()

    def _prefetch(self, action: Action) -> None:
        """Post the receive for an action, unless that would block for a header."""
        message = message_before(self.table, action)
        if message is not None and self.comm.can_post_recv(message):
            self.comm.post_recv(message)

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        message = message_before(self.table, action)
        values, metas = self.comm.recv_forward(message) if message else ([], ())
        leaves = [
            value.requires_grad_(meta.has_gradient)
            for value, meta in zip(values, metas, strict=True)
        ]
        # A stage may begin with an in-place operation, which autograd forbids on a leaf: clone it.
        inputs = tuple(leaf.clone() if leaf.requires_grad else leaf for leaf in leaves)
        output = self.compute(stage, microbatch, inputs)
        if self._has_split_backward:
            # torch's split backward detaches the roots in place. It cannot detach a view, nor a
            # tensor that the stage's own graph has saved.
            output = output._replace(values=tuple(value.clone() for value in output.values))
        self._saved[stage, microbatch] = leaves, output
        sent = message_after(self.table, action)
        if sent is not None:
            self.comm.send(sent, output.values)

    def _backward(self, action: Action) -> None:
        received, output = self._saved.pop(action[1:])
        _differentiate(self._roots(action, output))
        self._send_gradients(action, received)

    def _backward_inputs(self, action: Action) -> None:
        """Compute gradients of inputs only: the stage before waits for them."""
        from shoal.platform.torch_private.pipelining import stage_backward_input

        received, output = self._saved.pop(action[1:])
        roots = self._roots(action, output)
        leaves = [leaf for leaf in received if leaf.requires_grad]
        parameters = self._trainable[action.stage]
        # torch's split backward finds only parameters between roots and leaves. Roots that depend
        # on no leaf are left for the W action: no other stage waits for their gradients.
        dependent, independent = _split_roots(roots, leaves)
        groups: list[dict[str, Any]] = []
        if dependent and parameters:
            values = [value for value, _ in dependent]
            # torch takes None for gradients of ones.
            gradients = [gradient for _, gradient in dependent if gradient is not None] or None
            _, groups = stage_backward_input(values, gradients, leaves, iter(parameters))
            groups = disjoint_groups(groups, parameters)
        else:
            _differentiate(dependent, retain_graph=bool(independent))
        self._weight_backwards[action[1:]] = independent, groups
        self._send_gradients(action, received)

    def _backward_weights(self, action: Action) -> None:
        """Compute gradients of weights: the rest of the backward pass."""
        roots, groups = self._weight_backwards.pop(action[1:])
        # Both calls may go through values that were computed from parameters alone.
        _differentiate(roots, retain_graph=bool(groups))
        add_weight_gradients(groups)

    def _roots(self, action: Action, output: StageOutput) -> Roots:
        """Return the roots of a backward pass; receive their gradients. Blocks."""
        objective = output.objective
        if objective is not None:
            if not objective.requires_grad:
                raise UsageError(
                    "pipeline: the loss has no gradient: it was computed from detached tensors or "
                    "under torch.no_grad. Compute it from the model's output itself."
                )
            return [(objective, None)]
        message = message_before(self.table, action)
        assert message is not None
        values = [value for value in output.values if value.requires_grad]
        pairs = zip(values, self.comm.recv_backward(message), strict=True)
        return [(value, gradient) for value, gradient in pairs if gradient is not None]

    def _send_gradients(self, action: Action, received: Sequence[Tensor]) -> None:
        message = message_after(self.table, action)
        if message is not None:
            gradients = [leaf.grad for leaf in received if leaf.requires_grad]
            self.comm.send(message, gradients)


def _differentiate(roots: Roots, retain_graph: bool = False) -> None:
    if roots:
        values, gradients = zip(*roots, strict=True)
        torch.autograd.backward(values, gradients, retain_graph=retain_graph)


def _split_roots(roots: Roots, leaves: Sequence[Tensor]) -> tuple[Roots, Roots]:
    """Return the roots that depend on `leaves`, and the others."""
    dependent: Roots = []
    independent: Roots = []
    leaf_ids = {id(leaf) for leaf in leaves}
    for root in roots:
        depends = any(id(leaf) in leaf_ids for leaf in _leaves_of(root[0]))
        (dependent if depends else independent).append(root)
    return dependent, independent


def is_reached_by_others(value: Tensor, parameters: Container[int]) -> bool:
    """Return whether a value depends on a differentiable tensor that is none of the parameters.

    Args: parameters: their ids.
    """
    if not value.requires_grad:
        return False
    return any(id(leaf) not in parameters for leaf in _leaves_of(value))


def _leaves_of(value: Tensor) -> Iterator[Tensor]:
    """Yield the differentiable tensors from which a value was computed."""
    for node in nodes_behind([value.grad_fn]):
        # Only the nodes that accumulate into leaves have a `variable`.
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def disjoint_groups(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups in the order of their parameters, and no parameter in two of them.

    torch notes for each group of parameters the nodes of the graph between them and the loss, with
    the gradients that have reached these nodes. Where parts of one parameter go separate ways, as
    queries and keys of a cross attention do, it may be in two groups, or in one: that follows from
    the order of a set, thus from addresses in memory. It must be in one: each group adds to its
    gradient, and ranks of a tensor group exchange gradients in the order of groups.

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
                # The I action has found this node's full gradient; what arrives now is a part.
                hook = node.register_prehook(lambda _, of_node=of_node: of_node)
                stack.callback(hook.remove)
                for index, gradient in enumerate(of_node):
                    if gradient is not None:
                        edges.append(GradientEdge(node, index))
                        gradients.append(gradient)
            if not edges:
                continue
            # Groups may share nodes, as weights before a cross attention do: keep the graph.
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
