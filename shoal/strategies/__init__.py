"""Strategies by name, and the one line that chooses them: `ddp` or `ddp,unused=true`.

A new strategy is one file, one line in `STRATEGIES`, one row in the conformance table of the tests.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml

from shoal.errors import ConfigError, did_you_mean
from shoal.strategies.base import Strategy
from shoal.strategies.ddp import Ddp
from shoal.strategies.single import Single

STRATEGIES: dict[str, type[Single] | type[Ddp]] = {"single": Single, "ddp": Ddp}


def parse(line: str) -> Strategy:
    """The strategy that `line` names. Raises ConfigError with every problem of the line."""
    name, *options = [word.strip() for word in line.split(",")]
    if name not in STRATEGIES:
        raise ConfigError([f"strategy '{line}': '{name}' is not known; {did_you_mean(name, STRATEGIES)}"])
    kind = STRATEGIES[name]
    known = {field.name: type(field.default) for field in fields(kind)}
    values: dict[str, Any] = {}
    problems = []
    for option in options:
        key, _, text = option.partition("=")
        if key not in known:
            hint = did_you_mean(key, known) if known else f"{name} has no options"
            problems.append(f"strategy '{line}': option '{key}' is not known; {hint}")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if known[key] is float and type(value) is int:
            value = float(value)
        if type(value) is not known[key]:
            problems.append(f"strategy '{line}': {key} must be a {known[key].__name__}, not '{text}'")
        values[key] = value
    if problems:
        raise ConfigError(problems)
    return kind(**values)
