"""`python -m tests.scripts.report docs/scripts.md`: every script under every strategy, as a page.

`make scripts` calls it. Never edit that page by hand, nor scripts.json beside it, from which the
page is made and which the tests compare with. With `--more` only those cells are measured that are
missing or defective; names of layouts, such as `"ddp on 2"`, or of scripts restrict it further.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections import Counter
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import median_low

import torch

import shoal
from tests.scripts.runner import (
    BY_DESIGN,
    DEFECTS,
    EXACT,
    LAYOUTS,
    Cell,
    Layout,
    judge_all,
)
from tests.scripts.script import Script, catalog, lines_changed, pretrained

RECORD = Path(__file__).parents[2] / "docs" / "scripts.json"
AT_ONCE = 20
"""Scripts that are measured before the results are written."""

PAGE = """\
# Scripts

Can a script of yours be trained by several ranks, and does it give the numbers of one device? These
are {scripts} kinds of script of `tests/scripts/catalog`, each in plain PyTorch, and with the lines
changed that Shoal needs, {median} at the median. Both train in float64 on the CPU from the same
weights, on batches of 7, 7 and 4 samples, which no number of ranks divides evenly. Every loss and
every weight is compared, on every rank. Of the cells that were run: {summary}.

A cell is **exact** where the relative error is at most 1e-10; **by design**, where the numbers
differ and a note said so before the first step; **refused**, where Shoal stopped with the cause and
a cure. Any other cell would be a defect: numbers that differ silently, or an error of torch's own.

The table has the layouts in which scripts are not exact, with the number of the message below.
`local=2` and `diloco=2`, which are never exact, stand there only where they are refused.
In brackets stands what a script follows; *unchanged* ones leave out what Shoal must know, and
should be refused. Every cell, its error and its whole message are in
[scripts.json](scripts.json). Layouts: {layouts}.

{table}

## Notes and messages

{notes}

Written by `make scripts`: {versions}.
"""

Key = tuple[str, str, int, int]
"""Script, strategy, ranks, parts of each rank's share."""


def main() -> None:
    """Measure cells, and write the page and its JSON after every few scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--more", action="store_true", help="keep what is measured and no defect")
    parser.add_argument("only", nargs="*", help="names of scripts or layouts")
    options = parser.parse_args()
    data = options.page.with_suffix(".json")
    cells = read(data)
    scripts = all_scripts()
    for layout in LAYOUTS:
        names = [n for n in scripts if _is_wanted(n, layout, options.only, cells, options.more)]
        for start in range(0, len(names), AT_ONCE):
            for name, cell in judge_all(names[start : start + AT_ONCE], layout).items():
                cells[name, *layout] = cell
            write(data, cells)
            options.page.write_text(page(cells))
        if names:
            counts = Counter(cells[name, *layout].verdict for name in names)
            print(layout, dict(counts), flush=True)


def all_scripts() -> dict[str, type[Script]]:
    """Return the scripts of the catalog, and those of transformers where that is installed."""
    return catalog() | (pretrained() if find_spec("transformers") else {})


def _is_wanted(
    name: str, layout: Layout, only: Collection[str], cells: Mapping[Key, Cell], more: bool
) -> bool:
    if only and not {name, str(layout)} & {*only}:
        return False
    cell = cells.get((name, *layout))
    return not more or cell is None or cell.verdict in DEFECTS


def read(data: Path) -> dict[Key, Cell]:
    """Return the cells of a file of `write` that are still in the catalog."""
    if not data.exists():
        return {}
    current = {(name, *layout) for name in all_scripts() for layout in LAYOUTS}
    cells = {tuple(key): Cell(*cell) for key, cell in json.loads(data.read_text())}
    # Without transformers its cells are kept as they are.
    return {key: cell for key, cell in cells.items() if key in current or key[0].startswith("Hf")}


def write(data: Path, cells: Mapping[Key, Cell]) -> None:
    """Write the cells as JSON, one on each line."""
    lines = [json.dumps([key, cell]) for key, cell in sorted(cells.items())]
    data.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def page(cells: Mapping[Key, Cell]) -> str:
    """Return the page in Markdown."""
    texts: dict[str, str] = {}  # filled by _number
    measured = {name for name, *_ in cells}
    scripts = {name: script for name, script in all_scripts().items() if name in measured}
    groups: dict[str, list[str]] = {}
    for name, script in scripts.items():
        exceptions = _exceptions(name, cells, texts) or "exact everywhere"
        groups.setdefault(exceptions, []).append(f"`{name}` ({script.follows})")
    rows = [f"| {not_exact} | {'; '.join(named)} |" for not_exact, named in groups.items()]
    counts = Counter(cell.verdict for key, cell in cells.items() if key[0] in scripts)
    return PAGE.format(
        scripts=len(scripts),
        median=median_low(map(lines_changed, scripts.values())),
        summary=", ".join(f"{count} {word}" for word, count in counts.most_common()),
        layouts=", ".join(f"`{_short(layout)}`" for layout in LAYOUTS),
        table="\n".join(["| not exact | scripts |", "|---|---|", *rows]),
        notes="\n".join(f"{number}. {text}" for number, text in enumerate(texts.values(), start=1)),
        versions=(
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"shoal {shoal.__version__}"
        ),
    )


def _short(layout: Layout) -> str:
    accumulated = f" x {layout.accumulate}" if layout.accumulate > 1 else ""
    return f"{layout.strategy} on {layout.ranks}{accumulated}"


def _exceptions(name: str, cells: Mapping[Key, Cell], texts: dict[str, str]) -> str:
    """Return the layouts of a script that are not exact, by the number of their message.

    Families of strategies that end alike in all their layouts are named once.
    """
    shown = {
        layout: _number(cell, texts)
        for layout in LAYOUTS
        if (cell := cells.get((name, *layout)))
        and not (layout.strategy in ("local=2", "diloco=2") and cell.verdict == BY_DESIGN)
    }
    names: dict[str, list[str]] = {}
    for family, layouts in groupby(shown, lambda layout: re.split(r"[\d=,]", layout.strategy)[0]):
        numbers = {layout: shown[layout] for layout in layouts}
        if len({*numbers.values()}) == 1:
            names.setdefault(min(numbers.values()), []).append(family)
        else:
            for layout, number in numbers.items():
                names.setdefault(number, []).append(_short(layout))
    rest = max(names, key=lambda number: len(names[number]))
    parts = [f"{', '.join(names[n])}: {n}" for n in names if n not in {rest, EXACT}]
    if rest != EXACT:
        parts += [f"exact: {', '.join(names[EXACT])}"] if EXACT in names else []
        parts += [f"all {'others' if len(names) > 1 else 'of them'}: {rest}"]
    return "; ".join(parts)


def _number(cell: Cell, texts: dict[str, str]) -> str:
    """Return the number of a cell's message, and add the message to `texts`.

    Messages that end in the same cure count as one. It is shown by its first clauses.
    """
    if cell.verdict == EXACT:
        return EXACT
    text = re.sub(r"^\w+: | \(\w+\.py:\d+\)| in \w+\.py:\d+", "", brief(cell.text))
    texts.setdefault(text[-45:], f"{cell.verdict}: {clause(text)}.")
    return str([*texts].index(text[-45:]) + 1)


def clause(text: str) -> str:
    """Return the first sentence of a message, and of a long one its first clauses."""
    first = re.split(r"[.;] (?=\w)|\n", text)[0].rstrip(".")
    long = re.match(r"(.{50,}?), (?:and|so|which|where|for|unlike|as|on) ", first)
    return long[1] if long else first


def brief(text: str) -> str:
    """Return a message in one line; of a traceback the last line."""
    if text.startswith("Traceback"):
        text = text.strip().rpartition("\n")[2]
    one_line = re.sub(r"\s+", " ", text).strip()
    return one_line.replace("|", "\\|").replace("<", "&lt;")[:600]


if __name__ == "__main__":
    main()
