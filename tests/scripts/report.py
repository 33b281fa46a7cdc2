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
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch

import shoal
from tests.scripts.runner import (
    BY_DESIGN,
    DEFECTS,
    EXACT,
    LAYOUTS,
    REFUSED,
    UNCHECKED,
    Cell,
    Layout,
    judge_all,
)
from tests.scripts.script import NEEDS, Script, catalog, lines_changed, pretrained

RECORD = Path(__file__).parents[2] / "docs" / "scripts.json"
AT_ONCE = 20
"""Scripts that are measured before the results are written."""

PAGE = """\
# Scripts

Can a script of yours be trained by several ranks, and does it give the numbers of one device? These
are {scripts} kinds of script of `tests/scripts/catalog`, each in plain PyTorch, and with the lines
changed that Shoal needs. Both train in float64 on the CPU from the same weights, on
batches of 7, 7 and 4 samples, which no number of ranks divides evenly. Every loss and every weight
is compared, on every rank.

Messages that differ by names and numbers only are shown once, as one of them read.

- **exact**: the relative error is at most 1e-10.
- **by design (n)**: the numbers differ, and note n was printed before the first step.
- **unchecked (n)**: the loss couples samples, the script does not say so, and this strategy could
  not find out: note n told that nothing has checked the loss.
- **refused (n)**: Shoal stopped with message n, which names the cause and a cure.

Nothing else may happen: neither numbers that differ silently, nor an error in torch's own words.
`x 2` means that each rank computed its share in two parts (`accumulate=2`). *Lines* counts those
that differ between the two versions, with `import shoal` and `shoal.init(...)`. A script whose
original is called *unchanged* leaves out what Shoal needs to know, so a refusal is what it is for.

{summary}

{table}

What is unusual about a script: {needs}.

## Notes and messages

{notes}

Written by `make scripts` on {date}: {versions}.
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
    cells = read(data) if options.more or options.only else {}
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
    texts: dict[str, str] = {}  # filled by _text
    scripts = all_scripts()
    layouts = [layout for layout in LAYOUTS if any(key[1:] == layout for key in cells)]
    head = ["script", "after", "unusual", "lines", *(_head(layout) for layout in layouts)]
    table = [head, ["---"] * len(head)]
    for name, script in scripts.items():
        results = [_text(cells.get((name, *layout)), texts) for layout in layouts]
        lines = str(lines_changed(script))
        table.append([f"`{name}`", script.follows, script.needs, lines, *results])
    counts = Counter(cell.verdict for key, cell in cells.items() if key[0] in scripts)
    return PAGE.format(
        scripts=len(scripts),
        summary=_summary(counts),
        table="\n".join(f"| {' | '.join(row)} |" for row in table),
        needs="; ".join(f"{letter} {meaning}" for letter, meaning in NEEDS.items()),
        notes="\n".join(f"{number}. {text}" for number, text in enumerate(texts.values(), start=1)),
        date=date.today().isoformat(),
        versions=(
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"shoal {shoal.__version__}"
        ),
    )


def _head(layout: Layout) -> str:
    accumulated = f" x {layout.accumulate}" if layout.accumulate > 1 else ""
    return f"`{layout.strategy}` on {layout.ranks}{accumulated}"


def _summary(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    good = ", ".join(
        f"{counts.get(word, 0)} {word}" for word in (EXACT, BY_DESIGN, UNCHECKED, REFUSED)
    )
    bad = sum(counts.get(word, 0) for word in DEFECTS)
    return f"Of {total} cells: {good}, {bad} defects."


def _text(cell: Cell | None, texts: dict[str, str]) -> str:
    """Return the text of a cell, and add what it refers to to `texts`.

    Messages that differ by names, lines and numbers only stand on the page once.
    """
    if cell is None:
        return "not run"
    if cell.verdict == EXACT:
        return EXACT
    text = brief(cell.text)
    kind = re.sub(r"\(.*?\)|under \S+:|\S+=\d+|[\d.]+|\S+:", "", text)[:60]
    texts.setdefault(kind, text)
    return f"{cell.verdict} ({list(texts).index(kind) + 1})"


def brief(text: str) -> str:
    """Return a message in one line; of a traceback the last line."""
    if text.startswith("Traceback"):
        text = text.strip().rpartition("\n")[2]
    one_line = re.sub(r"\s+", " ", text).strip()
    return one_line.replace("|", "\\|").replace("<", "&lt;")[:600]


if __name__ == "__main__":
    main()
