"""A Job made of a file and flags, with all of its values checked and their origins known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.fields import all_settings, build, convert, leaf_settings, open_setting
from shoal.config.job import Job
from shoal.config.layers import Layer, file_layers, flag_layer, merged
from shoal.config.rules import violations
from shoal.errors import raise_problems

DEFAULT = "default"


@dataclass(frozen=True)
class Settings:
    """A job, and the origin of each of its values.

    Args:
        job: the job.
        origins: `default`, `file.yaml:12` or `flag --optimizer.lr` by dotted name, which is
            `model.options.width` for a key of an open setting. The origin of a value that follows
            from the name of a file has no line.
    """

    job: Job
    origins: Mapping[str, str]


def read(source: str | Path | None, flags: Sequence[tuple[str, str]] = ()) -> Settings:
    """Return the settings of a configuration, with flags on top.

    Args:
        source: the name of a built-in configuration, the path of a YAML file, or None for defaults.
        flags: pairs of dotted name and text, as on the command line. The text is a YAML scalar, or
            a list or mapping in flow style.

    Raises:
        ConfigError: all problems, each with file and line, or flag.
    """
    problems: list[str] = []
    layers = [] if source is None else file_layers(source, problems)
    return resolve([*layers, flag_layer(flags, problems)], problems)


def resolve(layers: Sequence[Layer], problems: Sequence[str] = ()) -> Settings:
    """Return the settings of several layers, the lowest first.

    Args:
        layers: values by dotted name.
        problems: problems of the caller, which are reported with the others.

    Raises:
        ConfigError: there are problems, or values do not fit their settings or each other.
    """
    problems = list(problems)
    layer = merged(layers)
    values, failed = _converted(layer, problems)
    job = build(values)
    for names, text in violations(job):
        # In place of a value that could not be converted the job has the default. A rule that
        # compares it would report a value that nobody chose.
        if failed.isdisjoint(names):
            problems.append(f"{_origin_of(names, layer)}: {names[0]} {text}")
    raise_problems(problems)
    origins = {
        name: layer[name].origin if name in layer else DEFAULT for name in leaf_settings(job)
    }
    return Settings(job, origins)


def _converted(layer: Layer, problems: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Return values of the settings' types, and the settings whose values do not fit."""
    values: dict[str, Any] = {}
    failed: set[str] = set()
    for name, item in layer.items():
        try:
            if key := open_setting(name):
                values.setdefault(key[0], {})[key[1]] = item.plain()
            else:
                values[name] = convert(item, all_settings()[name])
        except ValueError as error:
            problems.append(f"{item.origin}: {name} {error}")
            failed.add(name)
    return values, failed


def _origin_of(names: Sequence[str], layer: Layer) -> str:
    """Return the origin of the first of these settings that is not a default.

    There is one, because defaults alone break no rule.
    """
    for name in names:
        for key, item in layer.items():
            if key == name or key.startswith(f"{name}."):
                return item.origin
    return DEFAULT
