"""Shoal's dialect of YAML, for reading and for writing.

PyYAML parses and emits; what a plain word means is decided here, once, for files, for flags and for
what Shoal writes.
The rules are those of YAML 1.2, plus `none`: `5e-5` and `1e3` are numbers, `no` and `on` are words,
`010` is ten. Tags are refused, and so is a key that stands twice."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from shoal.errors import ConfigError

# (tag, what it looks like, what it becomes); whatever fits none of them is a word.
PLAIN: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("null", re.compile(r"|~|[Nn]ull|NULL|[Nn]one"), lambda text: None),
    ("bool", re.compile(r"[Tt]rue|TRUE|[Ff]alse|FALSE"), lambda text: text.lower() == "true"),
    ("int", re.compile(r"[-+]?[0-9]+(_[0-9]+)*"), int),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    ("float", re.compile(r"[-+]?\.inf|\.nan"), lambda text: float(text.replace(".", ""))),
)


@dataclass(frozen=True)
class LocatedValue:
    """A value and where it stands.

    Args:
        value: None, bool, int, float, str, list[Placed] or dict[str, Placed].
        line: counted from 1; 0 where there is no file.
        text: a scalar as it was written, so that `name: 007` stays 007.
    """

    value: Any
    line: int = 0
    text: str = ""

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def plain_value(text: str) -> Any:
    """What an unquoted word of YAML stands for: None, a bool, an int, a float or the word
    itself.
    """
    return next((convert(text) for _, pattern, convert in PLAIN if pattern.fullmatch(text)), text)


def parse_file(text: str, where: str) -> dict[str, LocatedValue]:
    """The mapping that a YAML text holds; empty if the text is.

    Raises: ConfigError: what is wrong, each with `where` and its line; everything at once but for
    broken syntax."""
    problems: list[str] = []
    placed = _parse(text, problems)
    if not isinstance(placed.value, dict | None):
        problems.append(
            f"{placed.line}: a configuration is a mapping (`key: value`), not "
            f"{write(placed.plain())}"
        )
    if problems:
        raise ConfigError(f"{where}:{problem}" for problem in problems)
    return placed.value or {}


def parse_flag(text: str, where: str) -> LocatedValue:
    """The value of a flag: a list, a mapping or a quoted string in YAML's flow style, or else one
    plain word.

    Raises: ConfigError: brackets or quotes that do not close, a tag, a key that stands twice.
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return LocatedValue(plain_value(text), text=text)
    problems: list[str] = []
    placed = _parse(text, problems)
    if problems:
        raise ConfigError(f"{where}: {problem.partition(': ')[2]}" for problem in problems)
    return placed


def write(value: Any) -> str:
    """One value as YAML on one line, which `parse_flag` and other YAML readers read back as it
    was.
    """
    # Inside a list, so that PyYAML quotes what would mean something in one.
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True
    )
    return text.strip()[1:-1]


def _parse(text: str, problems: list[str]) -> LocatedValue:
    """The tree of a text. Problems are added as `LINE: what is wrong`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problems.append(f"{line}: not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        problems.append(f"{text.count(chr(10), 0, error.position) + 1}: not YAML: {error.reason}")
    else:
        problems.extend(
            f"{line}: tags (`!...`) are refused; write the plain value"
            for line in loader.tagged_lines
        )
        if node is not None:
            return _place(node, (), problems)
    return LocatedValue(None)


class _Loader(yaml.SafeLoader):
    """Composes nodes, and notes the lines of tags. It never constructs anything."""

    def __init__(self, text: str) -> None:
        self.tagged_lines: list[int] = []
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            self.tagged_lines.append(event.start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _place(node: yaml.Node, around: tuple[yaml.Node, ...], problems: list[str]) -> LocatedValue:
    line = node.start_mark.line + 1
    if node in around:
        problems.append(f"{line}: an alias stands inside what it stands for; write the value out")
        return LocatedValue(None, line)
    inside = (*around, node)
    if isinstance(node, yaml.MappingNode):
        return LocatedValue(dict(_items(node, inside, problems)), line)
    if isinstance(node, yaml.SequenceNode):
        return LocatedValue([_place(item, inside, problems) for item in node.value], line)
    assert isinstance(node, yaml.ScalarNode)
    return LocatedValue(node.value if node.style else plain_value(node.value), line, node.value)


def _items(
    node: yaml.MappingNode, inside: tuple[yaml.Node, ...], problems: list[str]
) -> Iterator[tuple[str, LocatedValue]]:
    first: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{line}: a key must be a word, not a list or a mapping")
        elif key.value in first:
            problems.append(
                f"{line}: '{key.value}' stands twice, on line {first[key.value]} too; remove one"
            )
        else:
            first[key.value] = line
            # The value's place is its key's line: that is the line that a reader looks for.
            placed = _place(value, inside, problems)
            yield key.value, LocatedValue(placed.value, line, placed.text)


class _Dumper(yaml.SafeDumper):
    """Quotes each string that this dialect or YAML 1.1 would take for something else."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            for tag, pattern, _ in PLAIN:
                if pattern.fullmatch(value):
                    return f"tag:yaml.org,2002:{tag}"
        resolved: str = super().resolve(kind, value, implicit)
        return resolved

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape line breaks, which would otherwise spread the value over several lines.
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    )


_Dumper.add_representer(str, _represent_text)
