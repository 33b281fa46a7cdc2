"""Skipped tests, counted by reason at the end of a run, with what installs the missing part.

A skip says what is missing: "there is no ssh client". `INSTALLS` knows what brings it.
"""

from __future__ import annotations

from collections import Counter

import pytest

SYSTEM = "sudo .ci/system-packages"
INSTALLS = {  # words of a reason: what to type
    "ssh": SYSTEM,
    "Slurm": SYSTEM,
    "mpirun": SYSTEM,
    "network namespaces": SYSTEM,
    "there is no fish": SYSTEM,
    "there is no zsh": SYSTEM,
    "there is no tcsh": SYSTEM,
    "transformers": "pip install '.[hf]'",
    "shoal[hf]": "pip install '.[hf]'",
    "lightning": "pip install '.[lightning]'",
    "mkdocs": "pip install '.[docs]'",
    "compile": "sudo apt-get install gcc python3-dev, then pip install -e .",
    "root can write": "run the tests as another user",
    "root": "run the tests as root",
    "CUDA": "run them on a machine with more GPUs",
}


def install_line(reason: str) -> str:
    """Return what to type for a reason; "" where nothing helps."""
    return next((line for words, line in INSTALLS.items() if words in reason), "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in reports)
    if not reasons:
        return
    terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        cure = install_line(reason)
        terminalreporter.write_line(f"{count:5}  {reason}" + (f" [{cure}]" if cure else ""))


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
