"""The way from a file and flags to a Job in which every value is known to be good and to come
from somewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.config_files import file_layers
from shoal.config.convert import convert
from shoal.config.fields import Setting, all_settings, build, leaf_settings, open_setting
from shoal.config.job import Job
from shoal.config.layers import Layer, flag_layer, merged
from shoal.config.rules import violations
from shoal.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True)
class Settings:
    """A job, and where each of its values came from.

    Args: job: what to do. origins: for each dotted name (`model.options.width` for a key of an open
        setting) `default`, `file.yaml:12` or
            `flag --optimizer.lr`. Values that follow from a file's name have the file alone.
    """

    job: Job
    origins: Mapping[str, str]


def read(source: str | Path | None, flags: Sequence[tuple[str, str]] = ()) -> Settings:
    """The settings of a configuration, with flags on top.

    Args: source: the name of a built-in configuration, the path of a YAML file, or None for
        defaults alone. flags: (dotted name, text) as on the command line; the text is a YAML scalar
        or a list or mapping in flow style.

    Raises: ConfigError: all that is wrong, each with file and line, or flag.
    """
    problems: list[str] = []
    layers = [] if source is None else file_layers(source, problems)
    return resolve([*layers, flag_layer(flags, problems)], problems)


def resolve(layers: Sequence[Layer], problems: Sequence[str] = ()) -> Settings:
    """The settings that the layers give together, the lowest first.

    Args:
        problems: those found on the way here, to be reported with the others.

    Raises: ConfigError: there are problems, or values that do not fit their settings or one
    another."""
    problems = list(problems)
    given = merged(layers)
    values, failed = _converted(given, problems)
    job = build(values)
    for names, text in violations(job):
        # A rule that compares a value which could not be read would speak of a default that nobody
        # chose.
        if failed.isdisjoint(names):
            problems.append(f"{_origin_of(names, given)}: {names[0]} {text}")
    if problems:
        raise ConfigError(problems)
    return Settings(
        job, {name: given[name].origin if name in given else DEFAULT for name in leaf_settings(job)}
    )


def _converted(given: Layer, problems: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Values of their settings' types, and the names of the settings whose values would not fit."""
    values: dict[str, Any] = {}
    failed: set[str] = set()
    for name, item in given.items():
        setting, key = _setting(name)
        try:
            if key:
                values.setdefault(setting.name, {})[key] = item.placed.plain()
            else:
                values[name] = convert(item.placed, setting)
        except ValueError as error:
            problems.append(f"{item.origin}: {name} {error}")
            failed.add(name)
    return values, failed


def _setting(name: str) -> tuple[Setting, str]:
    """The setting that a dotted name belongs to, and the key in it if it is an open one."""
    setting, key = open_setting(name) or (name, "")
    return all_settings()[setting], key


def _origin_of(names: Sequence[str], given: Layer) -> str:
    """The origin of the first value that somebody gave; a rule cannot be broken by defaults
    alone.
    """
    for name in names:
        for key, item in given.items():
            if key == name or key.startswith(f"{name}."):
                return item.origin
    return DEFAULT
