"""Dropout is off where ranks draw masks that one process cannot draw: in scripts without Shoal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional

from shoal.verification.script.run_record import RankRecord

_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_NOTE = "dropout is off in both runs: these ranks cannot draw the masks of one device."


def turn_off(record: RankRecord, under_shoal: bool) -> list[Callable[[], None]]:
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
