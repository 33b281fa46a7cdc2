"""The commands of the lessons, of the first page and of the README are typed as they stand there,
and print what the pages say.

A page has blocks of `console`: `$ command`, and the lines that it prints. `...` stands for any
lines, or for the rest of a line. Numbers with a point may differ in the last digits, for other
machines round otherwise; errors such as 4.7e-04 differ in size.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "docs" / "lessons"
PAGES = [*sorted(LESSONS.glob("*.md")), ROOT / "docs" / "start.md", ROOT / "README.md"]
ERROR = re.compile(r"\d\.\d+e-\d+")
NUMBER = re.compile(r"\d+\.\d+")
ROW = re.compile(r"^\| `((?:python|shoal launch) .*train\.py)` \| (.*) \|$", re.MULTILINE)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return each command of a page with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def typed(command: str, directory: Path) -> list[str]:
    """Return what a command prints, and its exit status where that is not 0."""
    programs = {"python": f"{sys.executable} ", "shoal": f"{sys.executable} -m shoal "}
    program, _, rest = command.partition(" ")
    ended = subprocess.run(
        programs[program] + rest,
        shell=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    status = [f"[exit {ended.returncode}]"] if ended.returncode else []
    return [*ended.stdout.splitlines(), *status]


def is_same(said: str, printed: str) -> bool:
    """Return True if a printed line is the one of the page, but for rounding."""
    if said.endswith("..."):
        said, printed = said.removesuffix("...").rstrip(), printed[: len(said) - 3].rstrip()
    said, printed = ERROR.sub("E", said), ERROR.sub("E", printed)
    if NUMBER.sub("#", said) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(said), NUMBER.findall(printed), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=1e-3) for a, b in pairs)


def agree(said: list[str], printed: list[str]) -> bool:
    """Return True if the lines of a page are those that were printed."""
    if not said:
        return not printed
    if said[0] == "...":
        return any(agree(said[1:], printed[begin:]) for begin in range(len(printed) + 1))
    return bool(printed) and is_same(said[0], printed[0]) and agree(said[1:], printed[1:])


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with the scripts of the lessons."""
    for directory in (tmp_path, tmp_path / "docs" / "lessons"):
        directory.mkdir(parents=True, exist_ok=True)
        for script in LESSONS.glob("*.py"):
            shutil.copy(script, directory)
    return tmp_path


@pytest.mark.limit(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.stem != "README" else [])
        for page in PAGES
    ],
    ids=[page.stem for page in PAGES],
)
def test_the_commands_of_a_page_print_what_it_says(here: Path, page: Path) -> None:
    assert commands(page)
    for command, said in commands(page):
        printed = typed(command, here)
        assert agree(said, printed), "\n".join([f"$ {command}", *printed])


@pytest.mark.slow
@pytest.mark.limit(600)
@pytest.mark.parametrize(("command", "cells"), ROW.findall((ROOT / "README.md").read_text()))
def test_a_row_of_the_readme_has_the_losses_of_that_command(
    here: Path, command: str, cells: str
) -> None:
    losses = re.findall(r"loss (\d\.\d+)", "\n".join(typed(command, here)))
    assert [float(loss) for loss in losses] == pytest.approx(
        [float(cell) for cell in cells.split(" | ")], rel=1e-3
    )


def test_every_row_of_the_readme_has_the_same_losses_and_each_lesson_leads_to_the_next() -> None:
    rows = ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) == 8
    (cells,) = {cells for _, cells in rows}
    _, said = commands(LESSONS / "1-one-process.md")[0]
    assert cells.split(" | ") == [line.split()[-1] for line in said[1:]]
    lessons = sorted(LESSONS.glob("*.md"))
    for lesson, following in pairwise(lessons):
        assert f"]({following.name})" in lesson.read_text()
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(f"](lessons/{lesson.name})" in index for lesson in lessons)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages if f"]({page}" not in index} == {"README.md"}


def test_a_page_and_a_print_that_differ_are_told_apart() -> None:
    assert agree(["a 1.5", "...", "b"], ["a 1.5004", "x", "y", "b"])
    assert agree(["error 4.7e-04, c..."], ["error 5.1e-09, cause"])
    assert not agree(["a 1.5"], ["a 1.6"])
    assert not agree(["a"], ["a", "b"])
    assert not agree(["a", "..."], ["b"])
