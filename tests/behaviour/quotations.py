"""The texts of errors and notes that tests quote, read from the sources of the tests.

A quotation is a string in `pytest.raises(..., match=...)`, or before the `in` of an assertion:
there as it stands, by the name of a constant, or by a parameter that `parametrize` gives. Of an
f-string each part is one. Where it stands does not matter: tests may be moved and renamed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

Expressions = Mapping[str, ast.expr]
"""What names stand for."""
TESTS = Path(__file__).parents[1]
HERE = Path(__file__).parent
SHORTEST = 3
"""Letters of a quotation; `x` and `, ` are in every text."""


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Every test file but those of this folder, by its path below `tests`."""
    paths = [path for path in sorted(TESTS.rglob("*.py")) if HERE not in path.parents]
    return [(str(path.relative_to(TESTS)), ast.parse(path.read_text())) for path in paths]


def quoted() -> dict[str, str]:
    """Each quotation, and the test where it is found first."""
    found: dict[str, str] = {}
    for path, module in sources():
        constants = _assigned(module.body)
        for function in _functions(module):
            known: Expressions = {
                **constants,
                **_assigned(function.body),
                **_parameters(function, constants),
            }
            for text in _quotations(function, known):
                if len(text.strip()) >= SHORTEST:
                    found.setdefault(text, f"{path}: {function.name}")
    return found


@cache
def all_texts() -> set[str]:
    """Every string constant in the sources of the tests; adjacent literals are one."""
    nodes = (node for _, module in sources() for node in ast.walk(module))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def missing(texts: Iterable[str]) -> list[str]:
    """Those of `texts` that no string in the tests contains."""
    present = all_texts()
    return [text for text in texts if not any(text in other for other in present)]


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def _quotations(function: ast.FunctionDef, known: Expressions) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
            for keyword in node.keywords:
                if keyword.arg == "match":
                    yield from _strings(keyword.value, known)
        elif isinstance(node, ast.Assert):
            for inner in ast.walk(node.test):
                if isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.In):
                    yield from _strings(inner.left, known)


def _strings(value: ast.expr, known: Expressions) -> Iterator[str]:
    """The string constants of an expression; a name stands for what it is known to be."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in known:
            yield from _strings(known[node.id], {})


def _assigned(body: Iterable[ast.stmt]) -> dict[str, ast.expr]:
    """What names are set to at the top level of a body."""
    found = {}
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            found[line.targets[0].id] = line.value
    return found


def _parameters(function: ast.FunctionDef, constants: Expressions) -> Expressions:
    """What `parametrize` gives each parameter, as a list of expressions."""
    found: dict[str, ast.expr] = {}
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize":
            given = ",".join(_strings(mark.args[0], {}))
            names = [name.strip() for name in given.split(",")]
            rows = mark.args[1]
            if isinstance(rows, ast.Name) and rows.id in constants:
                rows = constants[rows.id]
            if isinstance(rows, (ast.List, ast.Tuple)):
                for index, name in enumerate(names):
                    column = [_cell(row, index, len(names)) for row in rows.elts]
                    found[name] = ast.List([cell for cell in column if cell is not None])
    return found


def _cell(row: ast.expr, index: int, width: int) -> ast.expr | None:
    """The value of one parameter in a row, also of a `pytest.param`; None if not literal."""
    if isinstance(row, ast.Call) and ast.unparse(row.func) == "pytest.param":
        return row.args[index] if index < len(row.args) else None
    if width == 1:
        return row
    if isinstance(row, (ast.Tuple, ast.List)) and index < len(row.elts):
        return row.elts[index]
    return None
