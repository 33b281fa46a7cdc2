"""`python -m tests.conventions.source_numbers`: the numbers of the source in docs/design.md.

`make house` calls it. Never edit that table by hand.
"""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
# A strategy's folder has a `strategy` and a `cost`, and may have a `plan`; a contract of several
# implementations is a `base`. A verb of the command line has the name of what it calls.
REPEATED_MODULES = {"__init__", "__main__", "base", "cost", "plan", "strategy"}
LONGEST_LINE = 100
LONGEST_FILE = 500
MOST_ARGUMENTS = 7

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """One Python file.

    Attributes:
        name: path below the root of the repository.
        nodes: of its syntax tree.
    """

    name: str
    lines: list[str]
    nodes: list[ast.AST]

    @property
    def path(self) -> Path:
        """Path below the root of the repository."""
        return Path(self.name)

    def functions(self) -> Iterator[_Function]:
        """Yield all functions, those inside of classes and of other functions too."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield all classes."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield node


@cache
def sources(top: str) -> list[Source]:
    """Return the Python files below a folder of the repository."""
    found = []
    gc.disable()  # it would look through all trees again and again, for most of the time
    for path in sorted((ROOT / top).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        found.append(Source(name, text.splitlines(), list(ast.walk(ast.parse(text)))))
    gc.enable()
    return found


def constructor_arguments(owner: ast.ClassDef) -> int:
    """Return the number of arguments of `__init__` beside `self`; 0 without an `__init__`."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.args) + len(node.args.kwonlyargs) - 1
    return 0


def body_length(function: _Function) -> int:
    """Return the lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def share_of_words(package: list[Source]) -> float:
    """Return the share of lines that are docstrings or have a comment."""
    words = 0
    for source in package:
        words += sum("#" in line for line in source.lines)
        for node in source.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | _Function):
                words += len((ast.get_docstring(node) or "").splitlines())
    return words / sum(len(source.lines) for source in package)


def rows(package: list[Source]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: what is counted, and its number."""
    lengths = {source.name: len(source.lines) for source in package}
    longest = max(lengths, key=lambda name: lengths[name])
    yield "files", f"{len(package):,}"
    yield "lines", f"{sum(lengths.values()):,}"
    yield "median of the lines of a file", f"{median(lengths.values()):g}"
    yield "longest file", f"{lengths[longest]} lines (`{longest}`)"
    bodies = {
        f"{source.name}`, `{function.name}": body_length(function)
        for source in package
        for function in source.functions()
    }
    largest = max(bodies, key=lambda name: bodies[name])
    yield "longest body of a function", f"{bodies[largest]} lines (`{largest}`)"
    yield "median body of a function", f"{median(bodies.values()):g} lines"
    counts = [constructor_arguments(owner) for source in package for owner in source.classes()]
    yield "most arguments of a constructor", f"{max(counts)}"
    owners = [owner.name.lstrip("_") for source in package for owner in source.classes()]
    yield "names of several classes", f"{len(repeated(owners))}"
    stems = [source.path.stem for source in package]
    modules = [stem for stem in repeated(stems) if stem not in REPEATED_MODULES]
    yield "names of several modules", f"{len(modules)}"
    too_long = sum(len(line) > LONGEST_LINE for source in package for line in source.lines)
    yield f"lines of more than {LONGEST_LINE} characters", f"{too_long}"
    yield "lines of docstrings and comments", f"{100 * share_of_words(package):.0f} %"


def table() -> str:
    """Return the table as Markdown."""
    lines = [f"| {what} | {number} |" for what, number in rows(sources("shoal"))]
    return "\n".join(["| in `shoal/` | |", "|---|---|", *lines])


def main() -> None:
    """Print the table, and write it into docs/design.md."""
    text = table()
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
