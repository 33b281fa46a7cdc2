"""Conventions that keep the source searchable: one name, one thing; short lines; plain
sentences.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "shoal").rglob("*.py"))
SOURCES = sorted(
    path
    for top in ("shoal", "tests", "benchmarks", "examples")
    for path in (ROOT / top).rglob("*.py")
)
# A strategy's folder has a `strategy` and may have a `plan`; a contract of several implementations
# is a `base`.
REPEATED_MODULES = {"__init__", "__main__", "base", "plan", "strategy"}
RIDDLES = re.compile(r"(What|Whether|Of|Who|Until)\b")
LONGEST_LINE = 100


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every docstring, those below fields included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE:
        if path.stem not in REPEATED_MODULES:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_modules_of_a_repeatable_name_stand_in_folders_of_their_own() -> None:
    loose = [
        path
        for path in PACKAGE
        if path.stem in {"base", "plan", "strategy"} and path.parent == ROOT / "shoal"
    ]
    assert loose == []


def test_only_the_public_face_and_the_errors_lie_at_the_root_of_the_package() -> None:
    assert sorted(path.name for path in (ROOT / "shoal").glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "errors.py",
    ]


def test_no_line_is_longer_than_a_hundred_characters() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert too_long == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    riddles = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE
        for line, text in docstrings(ast.parse(path.read_text()))
        if RIDDLES.match(text.strip())
    ]
    assert riddles == []
