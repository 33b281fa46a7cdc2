"""Runs a table of actions on one rank: computes, sends what the next stage needs, waits for what
this one needs.

      1F1B on rank 1 of 3        ask ahead for f1, b0, ...
      ─────────────────────────────────────────────────────────────────────
      take f0   compute f0   give f0   take b0   compute b0   give b0   ...

The next action's message is asked for before this one computes, so that it travels meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.strategies.pipeline.p2p import StageComm, message_after, message_before
from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable
from shoal.strategies.pipeline.tensor_meta import TensorMeta
from shoal.trace.span import BACKWARD, FORWARD


class StageOutput(NamedTuple):
    """What a stage gives for a micro-batch: values for the next stage, or from the last one
    what is differentiated.
    """

    values: tuple[Tensor, ...]
    objective: Tensor | None = None


Compute = Callable[[int, int, tuple[Tensor, ...]], StageOutput]
"""(stage, micro-batch, what was received) -> what it gives."""


class _SavedForward(NamedTuple):
    """What is kept of a micro-batch between its forward and its backward pass."""

    leaves: list[Tensor]
    computed: StageOutput


class _Roots(NamedTuple):
    """What is differentiated, and the gradients that came for it."""

    values: list[Tensor]
    gradients: list[Tensor | None]

    def __bool__(self) -> bool:
        return bool(self.values)


class _SplitBackward(NamedTuple):
    """What is left of a backward pass for the weights."""

    apart: _Roots
    groups: list[dict[str, Any]]


class ScheduleExecutor:
    """One step of one rank.

    Args:
        compute: the forward pass of a stage.
        parameters: stage -> those that it uses.
    """

    def __init__(
        self,
        table: ScheduleTable,
        exchange: StageComm,
        compute: Compute,
        parameters: Callable[[int], Sequence[nn.Parameter]],
    ) -> None:
        self.table, self.exchange, self.compute, self.parameters = (
            table,
            exchange,
            compute,
            parameters,
        )
        self._held: dict[tuple[int, int], _SavedForward] = {}
        self._halves: dict[tuple[int, int], _SplitBackward] = {}
        self._looked_up: dict[int, list[nn.Parameter]] = {}
        self._is_halved = any(action.kind == "W" for row in table.rows for action in row)

    def run(self) -> Iterator[Action]:
        """Take all actions of this rank, one at a time: yields each when it is done."""
        row, recorder = self.table.rows[self.exchange.rank], self.exchange.wire.recorder
        for action, following in zip(row, [*row[1:], None], strict=True):
            self._prefetch_recvs(action)
            if following is not None:
                self._prefetch_recvs(following)
            with recorder.during(FORWARD if action.kind == "F" else BACKWARD, _named(action)):
                {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}[
                    action.kind
                ](action)
            yield action
        self.exchange.wire.flush()

    def _prefetch_recvs(self, action: Action) -> None:
        message = message_before(self.table, action)
        if message is not None and self.exchange.can_post_recv(message):
            self.exchange.post_recv(message)

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        message = message_before(self.table, action)
        values, forms = self.exchange.recv_forward(message) if message else ([], ())
        leaves = [_leaf(value, form) for value, form in zip(values, forms, strict=True)]
        # Copies of leaves are none: a stage may begin with a step that works in place.
        computed = self.compute(
            stage, microbatch, tuple(v.clone() if v.requires_grad else v for v in leaves)
        )
        # The backward pass in two halves detaches what is sent: a view cannot be, nor what the
        # stage itself has saved.
        values_sent = (
            tuple(value.clone() for value in computed.values)
            if self._is_halved
            else computed.values
        )
        self._held[stage, microbatch] = _SavedForward(leaves, computed._replace(values=values_sent))
        after = message_after(self.table, action)
        if after is not None:
            self.exchange.send_forward(after, values_sent)

    def _backward(self, action: Action) -> None:
        held = self._held.pop(action[1:])
        roots = self._roots(action, held)
        if roots:
            torch.autograd.backward(roots.values, roots.gradients)
        self._give_gradients(action, held)

    def _inputs(self, action: Action) -> None:
        """The half of the backward pass that the stage before waits for."""
        from shoal.platform.torch_private.pipelining import stage_backward_input

        held = self._held.pop(action[1:])
        roots = self._roots(action, held)
        wanted = [leaf for leaf in held.leaves if leaf.requires_grad]
        parameters = self._trained(action.stage)
        # torch's halves know of parameters on the way from what was received alone: what comes of
        # others is done with the weights, where nobody waits for it.
        near, apart = _split_weight_grads(roots, wanted)
        groups: list[dict[str, Any]] = []
        if near and parameters:
            # No gradients stands for ones.
            given = (
                None
                if held.computed.objective is not None
                else [g for g in near.gradients if g is not None]
            )
            _, groups = stage_backward_input(near.values, given, wanted, iter(parameters))
        elif near:
            torch.autograd.backward(near.values, near.gradients, retain_graph=bool(apart))
        self._halves[action[1:]] = _SplitBackward(apart, groups)
        self._give_gradients(action, held)

    def _weights(self, action: Action) -> None:
        from shoal.platform.torch_private.pipelining import stage_backward_weight

        half = self._halves.pop(action[1:])
        if half.apart:
            # Both may go through what was computed from parameters alone.
            torch.autograd.backward(
                half.apart.values, half.apart.gradients, retain_graph=bool(half.groups)
            )
        if half.groups:
            stage_backward_weight(iter(self._trained(action.stage)), half.groups)

    def _trained(self, stage: int) -> list[nn.Parameter]:
        """Looked up once a step: it takes as long as a small layer."""
        if stage not in self._looked_up:
            self._looked_up[stage] = [
                parameter for parameter in self.parameters(stage) if parameter.requires_grad
            ]
        return self._looked_up[stage]

    def _roots(self, action: Action, held: _SavedForward) -> _Roots:
        objective = held.computed.objective
        if objective is not None:
            if not objective.requires_grad:
                raise UsageError(
                    "pipeline: the loss has no gradient: it was computed from detached tensors or "
                    "under torch.no_grad. "
                    "Compute it from the model's output itself."
                )
            return _Roots([objective], [None])
        message = message_before(self.table, action)
        assert message is not None
        values = [value for value in held.computed.values if value.requires_grad]
        pairs = zip(values, self.exchange.recv_backward(message), strict=True)
        reached = [(value, gradient) for value, gradient in pairs if gradient is not None]
        return _Roots([value for value, _ in reached], [gradient for _, gradient in reached])

    def _give_gradients(self, action: Action, held: _SavedForward) -> None:
        message = message_after(self.table, action)
        if message is not None:
            self.exchange.send_backward(
                message, [leaf.grad for leaf in held.leaves if leaf.requires_grad]
            )


def _named(action: Action) -> str:
    """As traces and `shoal schedule` call it."""
    return f"{action.kind}{action.microbatch} of stage {action.stage}"


def _leaf(value: Tensor, form: TensorMeta) -> Tensor:
    return value.requires_grad_() if form.has_gradient else value


def _split_weight_grads(roots: _Roots, leaves: Sequence[Tensor]) -> tuple[_Roots, _Roots]:
    """Those that were computed from `leaves`, and those that were not."""
    near, apart = _Roots([], []), _Roots([], [])
    for value, gradient in zip(roots.values, roots.gradients, strict=True):
        side = near if _depends_on(value, leaves) else apart
        side.values.append(value)
        side.gradients.append(gradient)
    return near, apart


def _depends_on(value: Tensor, leaves: Sequence[Tensor]) -> bool:
    wanted = {id(leaf) for leaf in leaves}
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in wanted:
            return True
        seen.add(node)
        waiting.extend(function for function, _ in node.next_functions)
    return False
