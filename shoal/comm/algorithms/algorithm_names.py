"""Names of all-reduce algorithms in options.

The command line checks options with this file, so it must not import torch."""

from __future__ import annotations

from shoal.errors import ConfigError, did_you_mean

NAMES = ("backend", "ring", "tree", "hierarchical")
"""`backend` is the all-reduce of the process group itself."""


def refuse_unknown(name: str) -> None:
    """Raise ConfigError unless `name` is one of NAMES."""
    if name == "halving-doubling":
        raise ConfigError(f"allreduce={name}: is gone, for ring is as fast; use ring")
    if name not in NAMES:
        raise ConfigError(f"allreduce={name}: not known; {did_you_mean(name, NAMES)}")
