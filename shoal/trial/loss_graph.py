"""A look at the graph of a loss that the loop has computed: is it a mean over samples?

What it divides by, and whether samples influence one another, is told by ranks and micro-batches to
one another in some steps.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from torch import Tensor

from shoal.comm.axis import Axis
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.strategies.loss_terms import Counted
from shoal.trial.coupled_rows import couples_samples
from shoal.trial.loss_divisors import Divisor, LossPart, divisors_of, objection

MOST_OUTPUTS = 8
"""Outputs that are held until the loss comes, with the graphs that have made them."""
COUPLED = (
    "run.backward was given a loss in which samples influence one another ({place}): the gradient "
    "of a sample's output changes with the outputs of others. One device takes those of all ranks "
    "together, and so does a loss of rows that run.gather(output) has returned. Or, to train the "
    'mean of the ranks\' means, say so: run.backward(loss, reduction="ranks").'
)


class LossGraphCheck:
    """Looks at the losses of a loop, in the first steps and in two after each power of two.

    Without micro-batches each loss counts as a step, so of two that take turns both are looked at.

    Args:
        enabled: False, and nothing is looked at.
        in_parts: losses are those of micro-batches; `begin_step` is called before the first one.
    """

    def __init__(self, data: Axis, enabled: bool, in_parts: bool) -> None:
        self._data = data
        self._enabled = enabled and (in_parts or data.size > 1)
        self._in_parts = in_parts
        self._step = 0 if in_parts else 1
        self._outputs: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)
        self._parts: list[LossPart] = []

    def begin_step(self) -> None:
        """Forget what belongs to the step before."""
        self._step += 1
        self._outputs.clear()
        self._parts = []

    def add_outputs(self, output: Any) -> None:
        """Note what a model has returned, but for numbers: such a one may be the loss itself."""
        if self._is_due():
            self._outputs.extend(t for t in tensors_in(output) if t.dim() and t.grad_fn)

    def compare(self, loss: Tensor | Counted, rows: int, samples: int) -> None:
        """Compare a loss with those of other ranks and micro-batches. Collective.

        Args: samples: of this rank, of which outputs have one or several rows each; 0 if unknown.

        Raises: UsageError: on all ranks, if the loss is no mean over samples.
        """
        outputs = [*self._outputs]
        self._outputs.clear()
        if self._is_due():
            self._compare(loss, outputs, rows, samples)
        if not self._in_parts:
            self.begin_step()

    def _compare(
        self, loss: Tensor | Counted, outputs: list[Tensor], rows: int, samples: int
    ) -> None:
        place = f"rank {self._data.rank}"
        if self._in_parts:
            place += f", micro-batch {len(self._parts)}"
        self._parts.append(LossPart(place, rows, _divisors(loss, rows, outputs)))
        couples = isinstance(loss, Tensor) and couples_samples(loss, outputs, samples)
        told = self._data.all_gather_str(json.dumps([place if couples else "", self._parts]))
        parts = []
        for coupled_place, of_rank in map(json.loads, told):
            if coupled_place:
                raise UsageError(COUPLED.format(place=coupled_place))
            for place, rows, divisors in of_rank:
                parts.append(LossPart(place, rows, [Divisor(*divisor) for divisor in divisors]))
        if text := objection(parts):
            raise UsageError(text)

    def _is_due(self) -> bool:
        """Return True in steps 1 to 5, 8, 9, 16, 17, ..."""
        step = self._step
        is_due = step <= 4 or step & (step - 1) == 0 or (step - 1) & (step - 2) == 0
        return self._enabled and is_due


def _divisors(loss: Tensor | Counted, rows: int, outputs: list[Tensor]) -> list[Divisor]:
    try:
        return divisors_of(loss, rows, {output.grad_fn for output in outputs})
    except RuntimeError:
        return []  # the graph was used and freed: the backward pass says it
