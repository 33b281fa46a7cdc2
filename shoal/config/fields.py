"""The settings of a Job as one flat list under dotted names, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, reduce
from typing import Any, get_origin, get_type_hints

from shoal.config.job import Check, Job


@dataclass(frozen=True)
class Setting:
    """One field of a Job.

    Args:
        name: dotted, as in `optimizer.lr`.
        annotation: its type.
        default: what it is if nobody says otherwise.
        help: its meaning.
        check: what its type does not say.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    check: Check | None

    @property
    def section(self) -> str:
        """The dotted name up to the last dot; empty for the fields of the Job itself."""
        return self.name.rpartition(".")[0]

    @property
    def is_open(self) -> bool:
        """Whether it holds further names, as `model.options.width`."""
        return get_origin(self.annotation) is dict


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting under its dotted name, in the order of `job.py`, a section's own values
    before its subsections.
    """
    return {setting.name: setting for setting in _settings(Job, "")}


@cache
def all_sections() -> Mapping[str, str]:
    """The dotted names that hold settings and are none themselves, such as `train.warm_start`,
    with their meaning.
    """
    return dict(_sections(Job, ""))


def open_setting(name: str) -> tuple[str, str] | None:
    """(`model.options`, `width`) for `model.options.width`; None if the name lies in no such
    setting.
    """
    for setting in all_settings().values():
        if setting.is_open and name.startswith(f"{setting.name}."):
            return setting.name, name.removeprefix(f"{setting.name}.")
    return None


def build(values: Mapping[str, Any]) -> Job:
    """The Job with these values, already converted, under their dotted names; defaults for the
    others.
    """
    job: Job = _build(Job, "", values)
    return job


def value_of(job: Job, name: str) -> Any:
    """The value of the setting with this dotted name."""
    return reduce(getattr, name.split("."), job)


def leaf_settings(job: Job) -> dict[str, Any]:
    """Every value of a Job under its dotted name; an open setting is spread over its keys
    unless it is empty.
    """
    flat: dict[str, Any] = {}
    for name, setting in all_settings().items():
        value = value_of(job, name)
        spread = value if setting.is_open else None
        flat |= {f"{name}.{key}": item for key, item in spread.items()} if spread else {name: value}
    return flat


def _settings(section: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(section)
    inner = [field for field in fields(section) if is_dataclass(hints[field.name])]
    for field in fields(section):
        if field not in inner:
            default = (
                field.default_factory() if field.default_factory is not MISSING else field.default
            )
            metadata = field.metadata
            yield Setting(
                prefix + field.name, hints[field.name], default, metadata["help"], metadata["check"]
            )
    for field in inner:
        yield from _settings(hints[field.name], f"{prefix}{field.name}.")


def _sections(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield prefix + name, (hint.__doc__ or "").partition("\n")[0]
            yield from _sections(hint, f"{prefix}{name}.")


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
