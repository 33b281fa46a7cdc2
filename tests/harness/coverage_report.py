"""`python -m tests.harness.coverage_report FILE.json`: lines and branches that the tests take.

`make coverage` calls it with the JSON report of coverage.py. A row for each folder of `shoal/`,
then the whole. Ranks that a test kills write nothing: what only they do counts as not taken.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def table(files: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of files' summaries, as coverage.py names their counts."""
    folders: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for name, summary in files.items():
        parts = PurePath(name).parts
        inside = parts[parts.index("shoal") + 1 : -1]
        for folder in ("/".join(inside[:2]) or ".", "all"):
            counts = (summary[key] for key in COUNTS)
            folders[folder] = [sum(pair) for pair in zip(folders[folder], counts, strict=True)]
    lines = [f"{'folder':<32}{'lines':>8}{'taken':>9}{'branches':>11}{'taken':>9}"]
    for folder, (lines_all, lines_taken, branches, taken) in sorted(
        folders.items(), key=lambda row: (row[0] == "all", row[0])
    ):
        lines.append(
            f"{folder:<32}{lines_all:>8,}{_percent(lines_taken, lines_all):>9}"
            f"{branches:>11,}{_percent(taken, branches):>9}"
        )
    return "\n".join(lines)


def _percent(taken: int, count: int) -> str:
    return f"{100 * taken / count:.1f} %" if count else "-"


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(table({name: file["summary"] for name, file in report["files"].items()}))
