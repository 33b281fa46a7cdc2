"""Settings by which one process computes as the ranks do: weights, learning rates, no dropout.

Dropout is off where ranks draw masks that one process cannot draw: wherever the loop itself calls
the model, without Shoal or before `run.backward`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional
from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import RankRecord, recorded
from shoal.verification.script.watched_calls import watch

_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_NOTE = "dropout is off in both runs: these ranks cannot draw the masks of one device."


class SameStart:
    """Gives the models of one process the weights, and its optimizers the rates, of many ranks.

    Args:
        folder: of the record of the ranks.
        ranks: its indices.
        record: the index of this process, for notes.
    """

    def __init__(self, folder: Path, ranks: list[RankRecord], record: RankRecord) -> None:
        self._weights = recorded(folder, 0, "start")
        self._steps = {step.number: step for step in ranks[0].steps}
        self._record = record

    def load(self, names: ModelNames) -> None:
        """Copy the weights that rank 0 began with into the models."""
        differ = []
        with torch.no_grad():
            for name, parameter in names.parameters():
                if name in self._weights:
                    value = self._weights[name].to(parameter.dtype)
                    own = to_local(parameter)
                    if own.shape == value.shape and not torch.equal(own, value):
                        differ.append(name)
                        own.copy_(value)
        if differ:
            self._record.note(
                f"one process began with other weights than the ranks ({differ[0]} and "
                f"{len(differ) - 1} more), and was given theirs: the script's seed depends on "
                "the number of processes."
            )

    def set_rates(self, number: int, optimizer: Optimizer) -> None:
        """Give the groups of an optimizer the learning rates of the same step of the ranks."""
        step = self._steps.get(number)
        if step is None:
            return
        for group, settings in zip(optimizer.param_groups, step.settings, strict=False):
            rate = settings.get("lr")
            if rate is not None and float(group["lr"]) != rate:
                self._record.note(
                    f"the learning rate depends on the number of processes: {rate:g} on many, "
                    f"{float(group['lr']):g} on one, which was given that of many."
                )
                group["lr"] = rate


def turn_dropout_off(stack: ExitStack, record: RankRecord, stays_on: Callable[[], bool]) -> None:
    """Let functions of dropout return their input until the stack is closed.

    Args:
        record: of this rank; it gets a note.
        stays_on: returns True while the masks are those of one device.
    """

    def rate(p: float) -> float:
        if p <= 0 or stays_on():
            return p
        if not record.draws:
            record.note(_NOTE)
            record.draws = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
        return 0.0

    def dropout(
        original: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        return original(input, rate(p) if training else p, training, inplace)

    def attention(
        original: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> Any:
        return original(query, key, value, attn_mask, rate(dropout_p), *rest, **options)

    for name in _FUNCTIONS:
        watch(stack, torch.nn.functional, name, dropout)
    watch(stack, torch.nn.functional, "scaled_dot_product_attention", attention)
