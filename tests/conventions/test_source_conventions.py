"""Conventions that keep the source searchable: one name, one thing; plain sentences.

The length of lines and the complexity of functions are left to ruff.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.conventions.source_numbers import (
    LONGEST_FILE,
    MOST_ARGUMENTS,
    REPEATED_MODULES,
    ROOT,
    constructor_arguments,
    sources,
)

RIDDLES = re.compile(r"(What|Whether|Of|Who|Until)\b")


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every docstring, those below fields included."""
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for source in sources("shoal"):
        for owner in source.classes():
            places[owner.name.lstrip("_")].append(f"{source.name}:{owner.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for source in sources("shoal"):
        if source.path.stem not in REPEATED_MODULES:
            places[source.path.stem].append(source.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_modules_of_a_repeatable_name_stand_in_folders_of_their_own() -> None:
    loose = [
        source.name
        for source in sources("shoal")
        if source.path.stem in {"base", "plan", "strategy"} and len(source.path.parts) == 2
    ]
    assert loose == []


def test_only_the_public_face_and_the_errors_lie_at_the_root_of_the_package() -> None:
    assert sorted(path.name for path in (ROOT / "shoal").glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "errors.py",
    ]


def test_no_file_of_the_package_is_longer_than_500_lines() -> None:
    too_long = {source.name: len(source.lines) for source in sources("shoal")}
    assert {name: length for name, length in too_long.items() if length > LONGEST_FILE} == {}


def test_no_constructor_takes_more_than_seven_arguments() -> None:
    counts = {
        f"{source.name}:{owner.name}": constructor_arguments(owner)
        for source in sources("shoal")
        for owner in source.classes()
    }
    assert {name: count for name, count in counts.items() if count > MOST_ARGUMENTS} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    riddles = [
        f"{source.name}:{line}"
        for folder in ("shoal", "benchmarks")
        for source in sources(folder)
        for line, text in docstrings(source.nodes)
        if RIDDLES.match(text.strip())
    ]
    assert riddles == []
