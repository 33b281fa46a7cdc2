"""What a file or the flags give, as layers: values under dotted names, each with its origin.

A later layer wins. Where a setting is open (`model.options`), layers add up key by key; `none`
empties it first, and so does another `name` in the same section, since options belong to the name
that they were written for."""

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
    """A value that somebody gave, and who: `file.yaml:12`, `flag --optimizer.lr`."""

    placed: LocatedValue
    origin: str


Layer = dict[str, SourcedValue]


def file_layer(mapping: Mapping[str, LocatedValue], where: str, problems: list[str]) -> Layer:
    """The settings in a file's mapping; what does not belong there is added to problems."""
    layer: Layer = {}
    _flatten(mapping, "", where, layer, problems)
    return layer


def flag_layer(flags: Iterable[tuple[str, str]], problems: list[str]) -> Layer:
    """The settings in pairs of dotted name and text; of a repeated flag the last one counts.

    `("import", FILE)` may come several times and stands for all of `imports`.
    """
    layer: Layer = {}
    imports: list[LocatedValue] = []
    for name, text in flags:
        origin = f"flag --{name}"
        if name == "import":
            imports.append(LocatedValue(text, text=text))
            layer["imports"] = SourcedValue(LocatedValue(imports), origin)
            continue
        try:
            placed = parse_flag(text, origin)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        given: Layer = {}
        _flatten({name: placed}, "", origin, given, problems)
        layer |= given
    return layer


def merged(layers: Sequence[Layer]) -> Layer:
    """One layer of several, the lowest first. Its open settings have one entry a key and none
    of their own.
    """
    result: Layer = {}
    for layer in layers:
        for name in _cleared(layer, result):
            for key in [key for key in result if key.startswith(f"{name}.")]:
                del result[key]
        result |= {name: given for name, given in layer.items() if not _empties(name, given)}
    return result


def _flatten(
    mapping: Mapping[str, LocatedValue], prefix: str, where: str, layer: Layer, problems: list[str]
) -> None:
    for key, placed in mapping.items():
        name = prefix + key
        origin = f"{where}:{placed.line}" if placed.line else where
        is_mapping = isinstance(placed.value, dict)
        setting = all_settings().get(name)
        if is_mapping and (name in all_sections() or (setting and setting.is_open)):
            _flatten(placed.value, f"{name}.", where, layer, problems)
        elif problem := _mismatch(name, placed.value):
            problems.append(f"{origin}: {problem}")
        elif name in layer:
            problems.append(
                f"{origin}: {name} is set twice, at {layer[name].origin} too; remove one"
            )
        elif name not in all_sections():
            layer[name] = SourcedValue(placed, origin)


def _mismatch(name: str, value: Any) -> str:
    """Why nothing can be set under this name, or nothing of this kind; empty if it can."""
    if name in all_settings():
        return ""
    if name in all_sections():
        inside = ", ".join(
            other.removeprefix(f"{name}.")
            for other in all_settings()
            if other.startswith(f"{name}.")
        )
        # A section of comments only reads as none, and sets nothing.
        return "" if value is None else f"{name} is a section and takes no value; it holds {inside}"
    inside_open = open_setting(name)
    if inside_open is None:
        return unknown(name)
    setting, key = inside_open
    if key.isidentifier():
        return ""
    return (
        f"'{key}' cannot be a keyword argument in {setting}; write what lies deeper as KEY: {{...}}"
    )


def _empties(name: str, given: SourcedValue) -> bool:
    return name in all_settings() and all_settings()[name].is_open and given.placed.value is None


def _cleared(layer: Layer, below: Layer) -> list[str]:
    """The open settings whose keys in the layers below no longer hold."""
    names = [name for name, given in layer.items() if _empties(name, given)]
    for setting in all_settings().values():
        chooser = f"{setting.section}.name"
        if setting.is_open and chooser in layer:
            before = (
                below[chooser].placed.text if chooser in below else all_settings()[chooser].default
            )
            if layer[chooser].placed.text != before:
                names.append(setting.name)
    return names
