"""Shoal's dialect of YAML: parser and writer.

PyYAML does the syntax. The meaning of a plain word is defined here, for files, for flags and for
the files that Shoal writes. The rules are those of YAML 1.2, and `none`: `5e-5` and `1e3` are
numbers, `no` and `on` are words, `010` is ten. Tags, aliases and repeated keys are errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """A value with the line on which it was written.

    Args:
        value: None, bool, int, float, str, list[LocatedValue] or dict[str, LocatedValue].
        line: counted from 1; 0 where there is no file.
        text: a scalar as it was written, so that `name: 007` stays 007.
    """

    value: Any
    line: int = 0
    text: str = ""

    def plain(self) -> Any:
        """Return the value without lines."""
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
    problems: list[str] = []
    located = _parse(text, problems)
    if not isinstance(located.value, dict | None):
        problems.append(
            f"{located.line}: a configuration is a mapping (`key: value`), not "
            f"{write(located.plain())}"
        )
    if problems:
        raise ConfigError(f"{file_name}:{problem}" for problem in problems)
    return located.value or {}


def parse_flag(text: str, origin: str) -> LocatedValue:
    """Return the value of a flag.

    The text is a list, a mapping or a quoted string in YAML's flow style, or else one plain word.

    Raises:
        ConfigError: brackets or quotes are not closed, or there is a tag or a repeated key.
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return LocatedValue(plain_value(text), text=text)
    problems: list[str] = []
    located = _parse(text, problems)
    if problems:
        # Without the line, which is always 1.
        raise ConfigError(f"{origin}: {problem.partition(': ')[2]}" for problem in problems)
    return located


def write(value: Any) -> str:
    """Return a value as one line of YAML, which `parse_flag` and other YAML readers can read."""
    # As an item of a list, so that PyYAML quotes the characters with a meaning in flow style.
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True
    )
    return text.strip()[1:-1]


def _parse(text: str, problems: list[str]) -> LocatedValue:
    """Return the tree of a text; append problems, each as `LINE: problem`."""
    try:
        node = _Loader(text, problems).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problems.append(f"{line}: not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        problems.append(f"{text.count(chr(10), 0, error.position) + 1}: not YAML: {error.reason}")
    else:
        if node is not None:
            return _located(node, problems)
    return LocatedValue(None)


class _Loader(yaml.SafeLoader):
    """Composes nodes. It never constructs a Python object; tags and aliases are problems.

    A kilobyte of aliases to aliases would stand for terabytes.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        self._problems = problems
        self._depth = 0
        self._has_alias = False
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if not self._has_alias:  # a few kilobytes hold thousands of them
                self._has_alias = True
                problem = f"{line}: aliases (`*...`) are refused; write out what is meant"
                self._problems.append(problem)
            self.get_event()
            return yaml.ScalarNode("null", "", event.start_mark)  # type: ignore[arg-type]
        if event.tag is not None:
            self._problems.append(f"{line}: tags (`!...`) are refused; write the plain value")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"brackets are more than {MAX_DEPTH} deep"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _located(node: yaml.Node, problems: list[str]) -> LocatedValue:
    """Return the value of a node; append problems, each as `LINE: problem`."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return LocatedValue(dict(_items(node, problems)), line)
    if isinstance(node, yaml.SequenceNode):
        return LocatedValue([_located(item, problems) for item in node.value], line)
    assert isinstance(node, yaml.ScalarNode)
    value = node.value if node.style else plain_value(node.value)
    return LocatedValue(value, line, node.value)


def _items(node: yaml.MappingNode, problems: list[str]) -> Iterator[tuple[str, LocatedValue]]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{line}: a key must be a word, not a list or a mapping")
        elif key.value in lines:
            problems.append(
                f"{line}: '{key.value}' stands twice, on line {lines[key.value]} too; remove one"
            )
        else:
            lines[key.value] = line
            # A value has the line of its key, where a reader looks for it.
            located = _located(value, problems)
            yield key.value, LocatedValue(located.value, line, located.text)


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
