"""Names of all-reduce algorithms in options.

The command line checks options with this file, so it must not import torch."""

from __future__ import annotations

from shoal.errors import ConfigError, did_you_mean

NAMES = ("backend", "ring", "tree", "halving-doubling", "hierarchical")
"""`backend` is the all-reduce of the process group itself."""
CHOICES = (*NAMES, "auto")
"""All accepted names. Older configurations and checkpoints have `auto`; it means `backend`."""


def refuse_unknown(name: str, table: str) -> None:
    """Raise ConfigError unless `name` is one of CHOICES, and a table is used only with `auto`."""
    if name not in CHOICES:
        raise ConfigError([f"allreduce={name}: not known; {did_you_mean(name, NAMES)}"])
    if table and name != "auto":
        raise ConfigError(
            [f"table={table}: only allreduce=auto reads a table; this is allreduce={name}"]
        )
