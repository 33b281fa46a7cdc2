"""docs/security.md: each sentence and row says what shows it, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"
TEXT = PAGE.read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
SHOWN = "shown by"
MEASURED = "<!-- measured -->.*?<!-- /measured -->"
OTHERS = ("torch's", "the system's", "meant", "measured", "not tested")
MARK = re.compile(
    r"\[((?:\d+|torch's|the system's|meant|measured|not tested)(?:, (?:\d+|[a-z' ]+))*)\]$"
)


def rows_of(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the header and the cells of each row of all tables."""
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells_of(line)
        elif not line.startswith("|---"):
            yield header, cells_of(line)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences outside of tables, headings and code."""
    text = re.sub(f"```.*?```|{MEASURED}", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", "\n".join(lines))
    for paragraph in paragraphs:
        joined = " ".join(paragraph.removeprefix("- ").split())
        yield from (one for one in re.split(r"(?<=\.)\s+", joined) if one)


LISTED = [int(cells[0]) for _, cells in rows_of(TEXT) if cells[0].isdecimal()]


def test_the_lines_of_what_shows_it_are_numbered() -> None:
    assert [*range(1, len(LISTED) + 1)] == LISTED
    rows = [cells for header, cells in rows_of(TEXT) if header[-1] == "test"]
    assert len(rows) == len(LISTED)
    assert [cells for cells in rows if not re.search(r"`tests/\S+\.py::\w+`", cells[-1])] == []


def test_each_row_says_what_shows_it() -> None:
    rows = [cells for header, cells in rows_of(TEXT) if header[-1] == SHOWN]
    assert len(rows) > 40
    numbers = {str(number) for number in LISTED}
    for cells in rows:
        found = set(re.findall(r"\d+", cells[-1]))
        assert found <= numbers, cells
        assert found or any(word in cells[-1] for word in OTHERS), cells


def test_each_table_has_a_last_column_that_says_it() -> None:
    text = re.sub(MEASURED, "", TEXT, flags=re.DOTALL)
    assert {header[-1] for header, _ in rows_of(text)} == {SHOWN, "test"}


def test_each_sentence_says_what_shows_it() -> None:
    sentences = [*sentences_of(TEXT)]
    assert len(sentences) > 100
    assert [one for one in sentences if not MARK.search(one.rstrip("."))] == []


def test_each_mark_is_a_line_and_each_line_is_the_mark_of_something() -> None:
    marks = [cells[-1] for header, cells in rows_of(TEXT) if header[-1] == SHOWN]
    marks += [found[1] for one in sentences_of(TEXT) if (found := MARK.search(one.rstrip(".")))]
    used = {int(number) for mark in marks for number in re.findall(r"\d+", mark)}
    assert used == {*LISTED}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_test_that_proves_a_claim_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_each_file_that_the_page_links_to_exists(target: str) -> None:
    assert (PAGE.parent / target).exists()
