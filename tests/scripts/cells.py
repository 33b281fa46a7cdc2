"""`python -m tests.scripts.cells STRATEGY RANKS [ACCUMULATE] [NAME ...]` prints verdicts.

A name is that of a script or of a module, such as `vision` or `pretrained`; without names all
scripts run but those with models of transformers.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.scripts.runner import Layout, judge_all
from tests.scripts.script import catalog, loops, pretrained


def main(strategy: str, ranks: str, accumulate: str = "1", *wanted: str) -> None:
    asks_for_transformers = any(word.startswith(("pretrained", "Hf")) for word in wanted)
    scripts = catalog() | (pretrained() if asks_for_transformers else {})
    scripts |= loops() if wanted else {}
    names = [
        name
        for name, script in scripts.items()
        if not wanted or {name, script.__module__.rpartition(".")[2]} & {*wanted}
    ]
    start_s = time.monotonic()
    cells = judge_all(names, Layout(strategy, int(ranks), int(accumulate)))
    for name, cell in cells.items():
        text = cell.text if len(names) < 3 else cell.text.strip().rpartition("\n")[2]
        print(f"{name:26} {cell.verdict:9} {cell.error:.0e} {text}")
    counts = Counter(cell.verdict for cell in cells.values())
    print(dict(counts), f"{time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
