"""`python -m tests.ablation.report docs/checks.md`: what becomes of scripts without each check.

`make ablation` calls it. Scripts of the catalog, and loops that leave out what Shoal must be told,
run with all checks, then without several checks at once, and then, where a cell has changed,
without each of them. Never edit the page by hand, nor checks.json beside it. Names of checks
restrict what is measured; the rest stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.ablation.checks import CHECKS, WITHOUT
from tests.scripts.report import brief
from tests.scripts.runner import BY_DESIGN, DEFECTS, EXACT, REFUSED, Cell, Layout, judge_all
from tests.scripts.script import catalog, loops

LAYOUTS = [
    Layout("ddp", 2),
    Layout("zero3", 2),
    Layout("tensor=2", 2),
    Layout("pipeline=2", 2),
]
SERVERS = Layout("server=1", 2)
"""Of scripts that a check names, for each needs a world of its own."""
ALL = "all checks"
GROUP = 10
"""Checks that are switched off together at first: most of them decide no cell."""
GRADES = {EXACT: 0, BY_DESIGN: 1, "unchecked": 1, REFUSED: 2}
"""Verdicts from good to bad; a defect is worse than all of them."""

Cells = dict[str, Cell]
"""Cells by `script, layout`."""

PAGE = """\
# Checks

Every check of a run, and what becomes of scripts without it: {scripts} scripts in {layouts}. Checks
are switched off ten at a time, and where a cell changes, one by one. Checks that look at certain
calls of torch are tried on the scripts that make these calls, and in {servers} too. *Lines* are
those of the modules that only this check needs.

**Silent** are cells whose numbers then differ without a word; **worse** are cells that end in an
error of torch, hang, or are refused where they were exact. **Better** are cells that only this
check refuses or notes, and that are exact without it. A check without silent and worse cells looks
for a fault that none of these scripts has: the tests beside it plant the fault.

{table}
{missing}
The cells that change, and what they become, are in [checks.json](checks.json). Written by `make
ablation`; `shoal.init(guards=False)` leaves out those that cost time in steps.
"""


def main() -> None:
    """Measure, and write the page and its JSON after each check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("only", nargs="*", help="names of checks")
    parser.add_argument("--scripts", nargs="*", help="names of scripts or of their modules")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        options.measure.write_text(json.dumps(measure(names(options.scripts or ()))))
        return
    data = options.page.with_suffix(".json")
    found: dict[str, Cells] = {}
    if data.exists():
        stored = json.loads(data.read_text())
        found = {k: {n: Cell(*c) for n, c in cells.items()} for k, cells in stored.items()}
    if ALL not in found or not options.only:
        found[ALL] = in_a_process_without("", options.page, options.scripts or ())
    measured = {name.partition(",")[0] for name in found[ALL]}
    if new := [name for name in names(options.scripts or ()) if name not in measured]:
        found[ALL] |= in_a_process_without("", options.page, new)
    for group in groups(options.only or [*CHECKS]):
        scripts = options.scripts or CHECKS[group[0]].scripts.split()
        together = in_a_process_without("+".join(group), options.page, scripts)
        changed = {n.partition(",")[0] for n, c in together.items() if _changes(found, n, c)}
        for check in group:
            cells = together
            if len(group) > 1:
                cells = changed and in_a_process_without(check, options.page, [*changed])
            found[check] = found[ALL] | (cells or {})
        known = {name: found[name] for name in (ALL, *CHECKS) if name in found}
        data.write_text(as_json(known))
        options.page.write_text(page(known))
        print(*group, sep=", ", flush=True)


def groups(checks: Sequence[str]) -> list[list[str]]:
    """Return checks in groups that are switched off together.

    The trial of the loss decides most, and checks of some calls have scripts of their own.
    """
    alone = [[c] for c in checks if c == "trial of the loss" or CHECKS[c].scripts]
    rest = [check for check in checks if [check] not in alone]
    return [*alone, *(rest[i : i + GROUP] for i in range(0, len(rest), GROUP))]


def names(wanted: Collection[str] = ()) -> list[str]:
    """Return the names of all scripts, or of those that are wanted."""
    scripts = loops() | catalog()
    return [
        name
        for name, script in scripts.items()
        if not wanted or {name, script.__module__.rpartition(".")[2]} & {*wanted}
    ]


def in_a_process_without(check: str, page: Path, scripts: Sequence[str]) -> Cells:
    """Return all cells without a check, from a process of its own with a fork server of its own."""
    file = page.with_suffix(".part")
    variables = {**os.environ, WITHOUT: check}
    command = [sys.executable, "-m", "tests.ablation.report", str(page), "--measure", str(file)]
    command += ["--scripts", *scripts] if scripts else []
    subprocess.run(command, env=variables, check=True)
    cells = {name: Cell(*cell) for name, cell in json.loads(file.read_text()).items()}
    file.unlink()
    return cells


def measure(scripts: Sequence[str]) -> Cells:
    """Return the cells of scripts in all layouts."""
    named = {name for check in CHECKS.values() for name in check.scripts.split()}
    of_servers = [name for name in scripts if name in named]
    return {
        f"{name}, {layout}": cell._replace(text=brief(cell.text)[:200])
        for layout in (*LAYOUTS, SERVERS)
        for name, cell in judge_all(of_servers if layout == SERVERS else scripts, layout).items()
    }


def as_json(found: Mapping[str, Cells]) -> str:
    """Return all cells with all checks, and of each check those that change without it.

    Each cell has a line, so that changes can be read.
    """
    parts = []
    for check, cells in found.items():
        kept = [(n, c) for n, c in cells.items() if check == ALL or _changes(found, n, c)]
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(cell)}" for name, cell in kept)
        parts.append(f"{json.dumps(check)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _changes(found: Mapping[str, Cells], name: str, cell: Cell) -> bool:
    return name in found[ALL] and cell.verdict != found[ALL][name].verdict


def page(found: Mapping[str, Cells]) -> str:
    """Return the page in Markdown."""
    rows = [
        "| check | lines | decides | silent | worse | better | tests |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    for check, cells in found.items():
        if check == ALL:
            continue
        changed = {n: (found[ALL][n], c) for n, c in cells.items() if _changes(found, n, c)}
        silent = {n: p for n, p in changed.items() if p[1].verdict == "SILENT"}
        rest = {n: p for n, p in changed.items() if n not in silent}
        worse = {n: p for n, p in rest.items() if _grade(p[1]) > _grade(p[0])}
        better = {n: p for n, p in rest.items() if n not in worse}
        lines, decides = lines_of(check), CHECKS[check].decides
        counts = f"{len(silent)} | {len(worse)} | {len(better)}"
        file = CHECKS[check].planted_in
        tests = f"[{Path(file).stem}](../tests/{file})"
        rows.append(f"| {check} | {lines} | {decides} | {counts} | {tests} |")
    absent = [check for check in CHECKS if check not in found]
    return PAGE.format(
        scripts=len(names()),
        layouts=", ".join(map(str, LAYOUTS)),
        servers=SERVERS,
        table="\n".join(rows),
        missing=f"\nNot measured: {', '.join(absent)}.\n" if absent else "",
    )


def _grade(cell: Cell) -> int:
    return 3 if cell.verdict in DEFECTS else GRADES[cell.verdict]


def lines_of(check: str) -> int:
    """Return the lines of the modules that only this check needs."""
    total = 0
    for name in CHECKS[check].files:
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        file = Path(spec.origin)
        files = file.parent.glob("*.py") if file.name == "__init__.py" else [file]
        total += sum(len(each.read_text().splitlines()) for each in files)
    return total


if __name__ == "__main__":
    main()
