"""Settings by which one process computes as the ranks do: weights, learning rates, no dropout.

Dropout is off where ranks draw masks that one process cannot draw: in scripts without Shoal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional
from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import RankRecord, starting_weights

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
        self._weights = starting_weights(folder)
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
            self._note(
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
                self._note(
                    f"the learning rate depends on the number of processes: {rate:g} on many, "
                    f"{float(group['lr']):g} on one, which was given that of many."
                )
                group["lr"] = rate

    def _note(self, text: str) -> None:
        if text not in self._record.notes:
            self._record.notes.append(text)


def turn_dropout_off(record: RankRecord, under_shoal: bool) -> list[Callable[[], None]]:
    """Let functions of dropout return their input; return functions that put them back.

    Args:
        record: of this rank; it gets a note, and says if Shoal draws for the script.
        under_shoal: also in scripts with Shoal.
    """
    undo: list[Callable[[], None]] = []
    for name in (*_FUNCTIONS, "scaled_dot_product_attention"):
        original = getattr(torch.nn.functional, name)
        replacement = _without_p if name in _FUNCTIONS else _without_dropout_p
        setattr(torch.nn.functional, name, replacement(original, record, under_shoal))
        undo.append(partial(setattr, torch.nn.functional, name, original))
    return undo


def _without_p(original: Any, record: RankRecord, under_shoal: bool) -> Any:
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0 and (under_shoal or not record.by_shoal):
            _tell(record)
            p = 0.0
        return original(input, p, training, inplace)

    return dropout


def _without_dropout_p(original: Any, record: RankRecord, under_shoal: bool) -> Any:
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *is_causal: bool,
        **rest: Any,
    ) -> Any:
        if dropout_p > 0 and (under_shoal or not record.by_shoal):
            _tell(record)
            dropout_p = 0.0
        return original(query, key, value, attn_mask, dropout_p, *is_causal, **rest)

    return attention


def _tell(record: RankRecord) -> None:
    if _NOTE not in record.notes:
        record.notes.append(_NOTE)
        record.draws = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
