"""The settings of a Job as one flat list of dotted names, and a Job made of such a list.

A written value is converted to the type of its setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, reduce
from math import isfinite
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shoal.config.job import Check, Job
from shoal.config.yaml_subset import LocatedValue, write
from shoal.platform.plain_types import UNIONS, describe

MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Setting:
    """One field of a Job.

    Args:
        name: dotted, as in `optimizer.lr`.
        annotation: its type.
        default: its value where neither a file nor a flag has one.
        help: its meaning.
        check: a limit that the type does not express; None for no limit.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    check: Check | None

    @property
    def section(self) -> str:
        """Return the dotted name up to the last dot; empty for the fields of the Job itself."""
        return self.name.rpartition(".")[0]

    @property
    def is_open(self) -> bool:
        """Return True for a mapping with keys of the user, such as `model.options`."""
        return get_origin(self.annotation) is dict


@cache
def _sections() -> Mapping[str, Any]:
    """Return the dataclass of each section by its name, and the Job itself as the empty one."""
    hints = get_type_hints(Job)
    return {"": Job, **{name: kind for name, kind in hints.items() if is_dataclass(kind)}}


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return every setting by its dotted name, those of the Job itself first."""
    return {
        setting.name: setting
        for name, kind in _sections().items()
        for setting in _settings(name, kind)
    }


@cache
def all_sections() -> Mapping[str, str]:
    """Return the help texts of the sections, such as `train`, by name."""
    return {name: str(kind.__doc__) for name, kind in _sections().items() if name}


def open_setting(name: str) -> tuple[str, str] | None:
    """Split the name of a key in an open setting; None for any other name.

    `model.options.width` becomes (`model.options`, `width`).
    """
    for setting in all_settings().values():
        if setting.is_open and name.startswith(f"{setting.name}."):
            return setting.name, name.removeprefix(f"{setting.name}.")
    return None


def build(values: Mapping[str, Any]) -> Job:
    """Return a Job with these values, and defaults for all others.

    Args:
        values: values of the settings' types, by dotted name.
    """

    def of_section(section: str) -> dict[str, Any]:
        names = [name for name in values if all_settings()[name].section == section]
        return {name.rpartition(".")[2]: values[name] for name in names}

    sections = {name: kind(**of_section(name)) for name, kind in _sections().items() if name}
    return Job(**of_section(""), **sections)


def value_of(job: Job, name: str) -> Any:
    """Return the value of the setting with this dotted name."""
    return reduce(getattr, name.split("."), job)


def leaf_settings(job: Job) -> dict[str, Any]:
    """Return every value of a Job by its dotted name.

    An open setting has one entry for each of its keys; an empty one has one entry in all.
    """
    values: dict[str, Any] = {}
    for name, setting in all_settings().items():
        value = value_of(job, name)
        if setting.is_open and value:
            values |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            values[name] = value
    return values


def _settings(name: str, section: type) -> Iterator[Setting]:
    hints = get_type_hints(section)
    prefix = f"{name}." if name else ""
    for field in fields(section):
        if is_dataclass(hints[field.name]):
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        help, check = field.metadata["help"], field.metadata["check"]
        yield Setting(prefix + field.name, hints[field.name], default, help, check)


def convert(located: LocatedValue, setting: Setting) -> Any:
    """Return the value as the setting's type, within the setting's limits.

    A whole number may be written as `1e3`, and a number as a whole number; a bool is neither. In
    place of a list one value is enough. `none` is a value of the settings that may be None.

    Raises:
        ValueError: a sentence that continues the setting's name: the requirement and the value.
    """
    value = typed(located, setting.annotation)
    if setting.check is not None and value is not None:
        is_valid, requirement = setting.check
        if not is_valid(value):
            raise ValueError(f"{requirement}, not {write(value)}")
    return value


def typed(located: LocatedValue, annotation: Any) -> Any:
    """Return the value as a type.

    Args:
        annotation: bool, int, float, str, a Literal of str, tuple[X, ...], dict, X | None or
            X | a Literal of str | None.

    Raises:
        ValueError: as `convert` does.
    """
    if get_origin(annotation) in UNIONS:
        return _member(located, annotation)
    if get_origin(annotation) is Literal:
        return _choice(located, get_args(annotation))
    if get_origin(annotation) is tuple:
        items = located.value if isinstance(located.value, list) else [located]
        return tuple(typed(item, get_args(annotation)[0]) for item in items)
    if get_origin(annotation) is dict and isinstance(located.value, dict):
        return located.plain()
    return _scalar(located, annotation)


def _member(located: LocatedValue, union: Any) -> Any:
    """Return None, a word of the union's Literal, or a value of its other type."""
    kind, words = _members(union)
    if located.value is None or located.text in words:
        return located.text if located.text in words else None
    try:
        return typed(located, kind)
    except ValueError as error:
        if not words:
            raise
        raise ValueError(f"must be {describe(union)}, not {write(located.plain())}") from error


def _scalar(located: LocatedValue, annotation: Any) -> bool | int | float | str:
    """Return a bool, int, float or str. Raises ValueError where another type was written."""
    value = located.value
    # As text the value is used as it was written: `name: 007` is not "7".
    if annotation is str and located.text and value is not None:
        return located.text
    if annotation is float and type(value) in (int, float) and isfinite(value):
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is annotation and annotation in (bool, int, str):
        scalar: bool | int | str = value
        if annotation is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError("must be a whole number below 2^63")
        return scalar
    raise ValueError(f"must be {describe(annotation)}, not {write(located.plain())}")


def _choice(located: LocatedValue, choices: tuple[str, ...]) -> str:
    # The text, because a choice such as `no` or `1e3` may have been parsed to another type.
    if located.text in choices:
        return located.text
    close = get_close_matches(located.text, choices, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"must be one of {', '.join(choices)}, not {write(located.plain())}{hint}")


def _members(union: Any) -> tuple[Any, tuple[str, ...]]:
    """Return X and the words of X | Literal[words] | None."""
    types = [member for member in get_args(union) if member is not NoneType]
    (kind,) = (member for member in types if get_origin(member) is not Literal)
    words = [word for member in types if member is not kind for word in get_args(member)]
    return kind, tuple(words)
