"""Functions inside `torch.nn.utils.clip_grad_norm_`, to be replaced while a model is prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad

# Why: scripts import `clip_grad_norm_` and `clip_grad_value_` by name before a run begins, so these
# themselves cannot be replaced; both look up the norm, and the choice of a loop, by these names.
# Without: a norm over one stage of a pipeline would be taken for that of the model.
# Checked: 2.11, 2.13, 2.15.
TOTAL_NORM = "_get_total_norm"
USES_LISTS = "_has_foreach_support"


def replace(name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function by what `make` returns for it; return a function that puts it back.

    Why and without: see TOTAL_NORM. Checked: 2.11, 2.13, 2.15.
    """
    original = getattr(clip_grad, name)
    setattr(clip_grad, name, make(original))

    def put_back() -> None:
        setattr(clip_grad, name, original)

    return put_back
