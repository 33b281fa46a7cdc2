"""Shoal's dialect of YAML: parser and writer.

PyYAML does the syntax. The meaning of a plain word is defined here, for files, for flags and for
the files that Shoal writes. The rules are those of YAML 1.2, and `none`: `5e-5` and `1e3` are
numbers, `no` and `on` are words, `010` is ten. Tags, aliases and repeated keys are errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from shoal.errors import ConfigError

# (tag, pattern, conversion) of plain scalars; text that matches no pattern is a word.
PLAIN: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("null", re.compile(r"|~|[Nn]ull|NULL|[Nn]one"), lambda text: None),
    ("bool", re.compile(r"[Tt]rue|TRUE|[Ff]alse|FALSE"), lambda text: text.lower() == "true"),
    # Longer numbers are words: Python refuses to convert some of them, and no setting wants them.
    ("int", re.compile(r"[-+]?[0-9]{1,100}(_[0-9]{1,100}){0,10}"), int),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    ("float", re.compile(r"[-+]?\.inf|\.nan"), lambda text: float(text.replace(".", ""))),
)

MAX_DEPTH = 32
"""Most brackets inside each other, well before Python's own limit of recursion."""


@dataclass(frozen=True)
class LocatedValue:
    """A value, and where it was written.

    Args:
        value: None, bool, int, float, str, list[LocatedValue] or dict[str, LocatedValue].
        origin: `file.yaml:12`, or `flag --optimizer.lr`.
        text: a scalar as it was written, so that `name: 007` stays 007.
    """

    value: Any
    origin: str = ""
    text: str = ""

    def plain(self) -> Any:
        """Return the value without origins."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def plain_value(text: str) -> Any:
    """Return the meaning of an unquoted word: None, a bool, an int, a float or the word itself."""
    return next((convert(text) for _, pattern, convert in PLAIN if pattern.fullmatch(text)), text)


def parse_file(text: str, file_name: str) -> dict[str, LocatedValue]:
    """Return the mapping in a YAML text; empty for an empty text.

    Raises:
        ConfigError: all problems, each with `file_name` and line. Broken syntax ends the parsing,
            so it is reported alone.
    """
    reader = _Loader(text, lambda line: f"{file_name}:{line}")
    located = reader.read()
    if not isinstance(located.value, dict | None):
        reader.problems.append(
            f"{located.origin}: a configuration is a mapping (`key: value`), not "
            f"{write(located.plain())}"
        )
    if reader.problems:
        raise ConfigError(*reader.problems)
    return located.value or {}


def parse_flag(text: str, origin: str) -> LocatedValue:
    """Return the value of a flag.

    The text is a list, a mapping or a quoted string in YAML's flow style, or else one plain word.

    Raises:
        ConfigError: brackets or quotes are not closed, or there is a tag or a repeated key.
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return LocatedValue(plain_value(text), origin, text)
    reader = _Loader(text, lambda _: origin)
    located = reader.read()
    if reader.problems:
        raise ConfigError(*reader.problems)
    return located


def write(value: Any) -> str:
    """Return a value as one line of YAML, which `parse_flag` and other YAML readers can read."""
    # As an item of a list, so that PyYAML quotes the characters with a meaning in flow style.
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True
    )
    return text.strip()[1:-1]


class _Loader(yaml.SafeLoader):
    """Composes nodes. It never constructs a Python object; tags and aliases are problems.

    A kilobyte of aliases to aliases would stand for terabytes.

    Args: origin_of: returns the origin of a line, counted from 1.

    Attributes: problems: what is wrong, each with its origin.
    """

    def __init__(self, text: str, origin_of: Callable[[int], str]) -> None:
        self.problems: list[str] = []
        self._text, self._origin_of = text, origin_of
        self._depth = 0
        self._has_alias = False

    def read(self) -> LocatedValue:
        """Return the tree of the text."""
        try:
            super().__init__(self._text)
            node = self.get_single_node()
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            self._note(line, f"not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            line = self._text.count(chr(10), 0, error.position) + 1
            self._note(line, f"not YAML: {error.reason}")
        else:
            if node is not None:
                return self._located(node)
        return LocatedValue(None)

    def _note(self, line: int, problem: str) -> None:
        self.problems.append(f"{self._origin_of(line)}: {problem}")

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if not self._has_alias:  # a few kilobytes hold thousands of them
                self._has_alias = True
                self._note(line, "aliases (`*...`) are refused; write out what is meant")
            self.get_event()
            return yaml.ScalarNode("null", "", event.start_mark)  # type: ignore[arg-type]
        if event.tag is not None:
            self._note(line, "tags (`!...`) are refused; write the plain value")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"brackets are more than {MAX_DEPTH} deep"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _located(self, node: yaml.Node) -> LocatedValue:
        origin = self._origin_of(node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return LocatedValue(dict(self._items(node)), origin)
        if isinstance(node, yaml.SequenceNode):
            return LocatedValue([self._located(item) for item in node.value], origin)
        assert isinstance(node, yaml.ScalarNode)
        value = node.value if node.style else plain_value(node.value)
        return LocatedValue(value, origin, node.value)

    def _items(self, node: yaml.MappingNode) -> Iterator[tuple[str, LocatedValue]]:
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._note(line, "a key must be a word, not a list or a mapping")
            elif key.value in lines:
                before = lines[key.value]
                self._note(line, f"'{key.value}' stands twice, on line {before} too; remove one")
            else:
                lines[key.value] = line
                # A value has the line of its key, where a reader looks for it.
                yield key.value, replace(self._located(value), origin=self._origin_of(line))


class _Dumper(yaml.SafeDumper):
    """Quotes each string that this dialect or YAML 1.1 would read as another type."""

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
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
