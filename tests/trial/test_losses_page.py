"""The cures of docs/losses.md are what their trials call them: counted losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from known_losses import Language, ids, labels, mlp, padded, x
from torch import nn

import shoal
from shoal.trial import LossKind, try_loss

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def cure(number: int, **names: Any) -> Any:
    """Return compute_loss of an example of the page."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space = {"F": F, "torch": torch, "shoal": shoal, **names}
    exec(examples[number], space)
    return space["compute_loss"]


def kind_of(compute_loss: Any, args: tuple[Any, ...], model: nn.Module) -> LossKind:
    verdict = try_loss(compute_loss, args, {}, len(args[0]), [model])
    return verdict.kind


def test_a_count_of_tokens_cures_padding() -> None:
    model = Language()
    assert kind_of(cure(0, model=model), (ids(), padded()), model) is LossKind.COUNTED


def test_the_sum_of_class_weights_is_their_count() -> None:
    model, weight = mlp(), torch.tensor([0.1, 1.0, 2.0, 5.0])
    args = (x(), labels())
    assert kind_of(cure(1, model=model, weight=weight), args, model) is LossKind.COUNTED
