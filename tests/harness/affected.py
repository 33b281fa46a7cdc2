"""`python -m tests.harness.affected [FILE ...]`: the slow suites that guard what has changed.

Without files: those that differ from main, and those that are not committed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.harness.slow_cases import SLOW_CASES

ROOT = Path(__file__).parents[2]
ALWAYS = {"shoal/strategies": "verified", "shoal/trial": "scripts", "shoal/verification": "mutants"}


def changed_files() -> set[str]:
    """Return the files that differ from main, and those that git does not know yet."""
    base = subprocess.run(
        ["git", "merge-base", "HEAD", "main"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    commands = (
        ["git", "diff", "--name-only", base],
        ["git", "ls-files", "-o", "--exclude-standard"],
    )
    outputs = (subprocess.check_output(command, cwd=ROOT, text=True) for command in commands)
    return {line for output in outputs for line in output.splitlines()}


def targets(files: Iterable[str]) -> list[str]:
    """Return the commands that run the slow cases of these files."""
    files = set(files)
    slow, others = set(), set()
    for row in SLOW_CASES:
        guarded = any(_is_below(files, place) for place in row.guarded())
        if guarded or f"tests/{row.tests}" in files:
            if row.target == "test-slow":
                slow.add(f"tests/{row.tests}")
            else:
                others.add(row.target)
    others |= {target for place, target in ALWAYS.items() if _is_below(files, place)}
    lines = [f"make {target}" for target in sorted(others)]
    return [*lines, f'make test-slow TESTS="{" ".join(sorted(slow))}"'] if slow else lines


def _is_below(files: set[str], place: str) -> bool:
    return any(name == place or name.startswith(f"{place}/") for name in files)


if __name__ == "__main__":
    print("\n".join(targets(sys.argv[1:] or changed_files())) or "no slow suite")
