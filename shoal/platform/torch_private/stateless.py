"""The function behind `torch.func.functional_call`, to be replaced while a model is prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import stateless


def replace_functional_call(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace it by what `make` returns for it; return a function that puts it back.

    Why: scripts import `functional_call` by name before a run begins, and modules do not learn that
    they compute with other weights. Without: an engine would put the model's own weights in the
    place of those that were given, in silence. Checked: 2.11, 2.13, 2.15.
    """
    original = stateless._functional_call
    stateless._functional_call = make(original)

    def put_back() -> None:
        stateless._functional_call = original

    return put_back
