"""Values that nodes of a graph have saved for their backward pass."""

from __future__ import annotations

from typing import Any


def saved_value(node: Any, name: str) -> Any:
    """Return what a node has saved under a name, as "other" of a quotient; None without it.

    Why: torch's notes on autograd mechanics name these attributes, and their names begin with an
    underscore. Without: nobody knows what a loss divides by that is there already. Checked: 2.11,
    2.13, 2.15.

    Raises: RuntimeError: the graph was used and freed.
    """
    return getattr(node, f"_saved_{name}", None)
