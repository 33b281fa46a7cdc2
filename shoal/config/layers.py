"""Layers: the values of one file or of the flags, by dotted name, each with its origin.

A higher layer replaces the values of a lower one. An open setting (`model.options`) is merged key
by key. `none` empties it first. So does another `name` in the same section, because options belong
to the name for which they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.fields import all_sections, all_settings, open_setting
from shoal.config.suggest import unknown
from shoal.config.yaml_subset import LocatedValue, parse_flag
from shoal.errors import ConfigError


@dataclass(frozen=True)
class SourcedValue:
    """A value that is not a default, and its origin: `file.yaml:12`, `flag --optimizer.lr`."""

    located: LocatedValue
    origin: str


Layer = dict[str, SourcedValue]


def file_layer(mapping: Mapping[str, LocatedValue], file_name: str, problems: list[str]) -> Layer:
    """Return the settings in a file's mapping; append a problem for each unknown name."""
    layer: Layer = {}
    _flatten(mapping, "", file_name, layer, problems)
    return layer


def flag_layer(flags: Iterable[tuple[str, str]], problems: list[str]) -> Layer:
    """Return the settings in pairs of dotted name and text. The last of repeated flags counts.

    Several pairs `("import", FILE)` together are the setting `imports`.
    """
    layer: Layer = {}
    imports: list[LocatedValue] = []
    for name, text in flags:
        origin = f"flag --{name}"
        if name == "import":
            imports.append(LocatedValue(text, text=text))
            layer["imports"] = SourcedValue(LocatedValue(imports), origin)
            continue
        if not text.strip():
            problems.append(f"{origin}: the value is empty; `none` is the word for no value")
            continue
        try:
            located = parse_flag(text, origin)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        # A layer of its own: a repeated flag is no error, while a repeated name in a file is.
        flag: Layer = {}
        _flatten({name: located}, "", origin, flag, problems)
        layer |= flag
    return layer


def merged(layers: Sequence[Layer]) -> Layer:
    """Return one layer made of several, the lowest first.

    An open setting has one entry for each key, and none under its own name.
    """
    result: Layer = {}
    for layer in layers:
        for name in _emptied(layer, result):
            for key in [key for key in result if key.startswith(f"{name}.")]:
                del result[key]
        result |= {name: value for name, value in layer.items() if not _empties(name, value)}
    return result


def _flatten(
    mapping: Mapping[str, LocatedValue], prefix: str, source: str, layer: Layer, problems: list[str]
) -> None:
    """Add the settings of a nested mapping to `layer`, by dotted name."""
    for key, located in mapping.items():
        name = prefix + key
        origin = f"{source}:{located.line}" if located.line else source
        is_mapping = isinstance(located.value, dict)
        setting = all_settings().get(name)
        if is_mapping and (name in all_sections() or (setting and setting.is_open)):
            _flatten(located.value, f"{name}.", source, layer, problems)
        elif problem := _mismatch(name, located.value):
            problems.append(f"{origin}: {problem}")
        elif name in layer:
            problems.append(
                f"{origin}: {name} is set twice, at {layer[name].origin} too; remove one"
            )
        elif name not in all_sections():
            layer[name] = SourcedValue(located, origin)


def _mismatch(name: str, value: Any) -> str:
    """Return why this name cannot be set to this value; empty if it can."""
    if name in all_settings():
        return ""
    if name in all_sections():
        if value is None:  # a section that has only comments
            return ""
        prefix = f"{name}."
        inner = [other.removeprefix(prefix) for other in all_settings() if other.startswith(prefix)]
        return f"{name} is a section and takes no value; it holds {', '.join(inner)}"
    match = open_setting(name)
    if match is None:
        return unknown(name)
    setting, key = match
    if key.isidentifier():
        return ""
    return (
        f"'{key}' cannot be a keyword argument in {setting}; write what lies deeper as KEY: {{...}}"
    )


def _empties(name: str, value: SourcedValue) -> bool:
    """Return True for `none` in an open setting, which removes the keys of lower layers."""
    return name in all_settings() and all_settings()[name].is_open and value.located.value is None


def _emptied(layer: Layer, lower: Layer) -> list[str]:
    """Return the open settings of which `layer` removes the keys in lower layers."""
    names = [name for name, value in layer.items() if _empties(name, value)]
    for setting in all_settings().values():
        chooser = f"{setting.section}.name"  # `model.name` chooses whose `model.options` these are
        if setting.is_open and chooser in layer:
            previous = all_settings()[chooser].default
            if chooser in lower:
                previous = lower[chooser].located.text
            if layer[chooser].located.text != previous:
                names.append(setting.name)
    return names
