"""The settings of a Job as one flat list of dotted names, and a Job made of such a list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, reduce
from typing import Any, get_origin, get_type_hints

from shoal.config.job import Job
from shoal.config.setting_fields import Check


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
def all_settings() -> Mapping[str, Setting]:
    """Return every setting by its dotted name.

    The order is that of `job.py`, but a section's values come before its subsections.
    """
    return {setting.name: setting for setting in _settings(Job, "")}


@cache
def all_sections() -> Mapping[str, str]:
    """Return the help texts of the sections, such as `train.warm_start`, by dotted name."""
    return dict(_sections(Job, ""))


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
    job: Job = _build(Job, "", values)
    return job


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


def _settings(section: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(section)
    subsections = [field for field in fields(section) if is_dataclass(hints[field.name])]
    for field in fields(section):
        if field in subsections:
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        help, check = field.metadata["help"], field.metadata["check"]
        yield Setting(prefix + field.name, hints[field.name], default, help, check)
    for field in subsections:
        yield from _settings(hints[field.name], f"{prefix}{field.name}.")


def _sections(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(section)
    for field in fields(section):
        hint = hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield prefix + field.name, field.metadata["help"]
            yield from _sections(hint, f"{prefix}{field.name}.")


def _build(section: type, prefix: str, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(section)
    arguments = {}
    for field in fields(section):
        name = prefix + field.name
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], f"{name}.", values)
        elif name in values:
            arguments[field.name] = values[name]
    return section(**arguments)
