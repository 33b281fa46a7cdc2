"""`python -m tests.mutants.report docs/mutants.json`: the table of planted bugs in docs/proof.md.

`make mutants` calls it. Never edit that table by hand, nor the JSON, from which it is made. With
`--healthy 300` right loops run with so many seeds as well; `--table` only writes the table anew.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.mutants.mutant import Mutant, mutants
from tests.mutants.runner import CURVE, Case, Found, as_json, judge

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
AT_ONCE = 54
"""Mutants of one world, after which the results are written."""
BEGIN, END = "<!-- planted bugs: begin -->", "<!-- planted bugs: end -->"

Results = Mapping[str, Found]

TEXT = """\
{bugs} bugs were planted in right hand-written loops of two ranks, {linked} of them of a kind that
others have reported ([tests/mutants/catalog](../tests/mutants/catalog) has each with its reports,
which were found by search: six were opened again, one was looked for and not found, the others
were not opened).
Each loop runs three steps on two ranks and, unchanged, in one process on the same batches, under
the recorder and the comparison of `shoal.verify_script`. No bug acts where there is one process.

{summary}

*Seen in the losses*: those of a step differ by more than {curve:g}, which one may see in a plot.

{table}

{harmless}

Written by `make mutants`: Python {python}, torch {torch}; [mutants.json](mutants.json) has all.
"""


def main() -> None:
    """Measure, and write the JSON and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--healthy", type=int, default=0, help="runs of right loops, by seeds")
    parser.add_argument("--more", action="store_true", help="keep what is measured")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    data = read(options.data)
    if options.healthy:
        write(options.data, {"healthy": healthy(options.healthy)})
    elif not options.table:
        found = data.get("found", {}) if options.more else {}
        names = [name for name in mutants() if name not in found]
        for start in range(0, len(names), AT_ONCE):
            found |= measured(names[start : start + AT_ONCE])
            write(options.data, {"found": found})
    write(options.data, {})
    print(summary(mutants(), results(read(options.data))))


def read(file: Path) -> dict[str, Any]:
    """Return the JSON as it is now."""
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, more: Mapping[str, Any]) -> None:
    """Write results into the JSON, and the table into the page."""
    data = {**read(file), **more}
    file.write_text(as_text(data))
    PAGE.write_text(with_table(PAGE.read_text(), page(mutants(), results(data), data)))


def results(data: Mapping[str, Any]) -> Results:
    """Return what was found, by name."""
    known = mutants()
    return {n: Found(**value) for n, value in data.get("found", {}).items() if n in known}


def measured(names: Sequence[str]) -> dict[str, Any]:
    """Return the results of some mutants."""
    found = judge([Case(name) for name in names], timeout_s=600.0)
    return {case.name: as_json(value) for case, value in found.items()}


def healthy(count: int) -> dict[str, Any]:
    """Return which runs of right loops, each with a seed of its own, raised an alarm."""
    names = [name for name, mutant in mutants().items() if not mutant.is_bug]
    cases = [Case(names[i % len(names)], 1 + i // len(names)) for i in range(count)]
    found = judge(cases, timeout_s=1800.0)
    errors = [value.largest for value in found.values() if value.largest is not None]
    alarms = [f"{c.name} {c.seed}" for c, value in found.items() if value.verdict != "exact"]
    return {"runs": count, "alarms": alarms, "largest": max(errors, default=None)}


def as_text(data: Mapping[str, Any]) -> str:
    """Return JSON with one line for each mutant."""
    parts = []
    for key, value in data.items():
        if key == "found":
            lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(known: Mapping[str, Mutant], found: Results, data: Mapping[str, Any]) -> str:
    """Return the section in Markdown."""
    bugs = [m for m in known.values() if m.is_bug]
    silent = [m for m in known.values() if not m.is_bug]
    return TEXT.format(
        bugs=len(bugs),
        linked=sum(bool(m.links) for m in bugs),
        summary=summary(known, found),
        curve=CURVE,
        table=table(bugs, found),
        harmless=harmless_text(silent, found, data),
        python=platform.python_version(),
        torch=torch.__version__,
    )


def summary(known: Mapping[str, Mutant], found: Results) -> str:
    """Return a small table of shares."""
    bugs = [m for m in known.values() if m.is_bug and m.name in found]
    rows = ["| of planted bugs | |", "|---|---|"]

    def row(title: str, test: Callable[[Mutant, Found], bool]) -> None:
        rows.append(f"| {title} | {share(test(m, found[m.name]) for m in bugs)} |")

    row("caught", lambda m, f: f.is_caught)
    row("caught, and the right module named first", lambda m, f: f.names_module(m))
    row("caught, and the right class of cause", lambda m, f: f.names_cause(m))
    row("seen in the losses of these steps", lambda m, f: f.curve > CURVE)
    row("caught at a tolerance of 1e-3", lambda m, f: f.loose.startswith("differs"))
    return "\n".join(rows)


def share(values: Iterable[bool]) -> str:
    """Return "72 of 78 (92 %)"."""
    flags = [*values]
    if not flags:
        return "not run"
    return f"{sum(flags)} of {len(flags)} ({100 * sum(flags) / len(flags):.0f} %)"


def table(bugs: Iterable[Mutant], found: Results) -> str:
    """Return a row for each cause that was named, with a bug that was reported as an example."""
    rows = ["| cause that is named | bugs | seen in the losses | such as |", "|---|--:|--:|---|"]
    causes: dict[str, list[Mutant]] = {}
    for mutant in (mutant for mutant in bugs if mutant.name in found):
        result = found[mutant.name]
        unseen = "none: in a note alone" if result.noted else "**missed**"
        causes.setdefault(result.cause if result.is_caught else unseen, []).append(mutant)
    for cause, mutants_of in causes.items():
        example = max(mutants_of, key=lambda mutant: len(mutant.links))
        links = "".join(link(reference) for reference in example.links[:1])
        seen = sum(found[mutant.name].curve > CURVE for mutant in mutants_of)
        such = f"{example.change} ({links})" if links else example.change
        rows.append(f"| {cause} | {len(mutants_of)} | {seen} | {such} |")
    return "\n".join(rows)


def link(reference: str) -> str:
    """Return a link to an issue, "owner/repository#number"."""
    place, number = reference.split("#")
    return f"[{reference}](https://github.com/{place}/issues/{number})"


def harmless_text(silent: list[Mutant], found: Results, data: Mapping[str, Any]) -> str:
    """Return which changes stayed silent, and the number of false alarms."""
    changes = [m for m in silent if not m.change.startswith("none")]
    alarms = [m.name for m in silent if m.name in found and found[m.name].verdict != "exact"]
    text = (
        f"{len(silent) - len(changes)} right loops and {len(changes)} harmless changes, such as "
        f"{changes[0].change}, must stay silent; alarms: {', '.join(alarms) or 'none'}."
    )
    if runs := data.get("healthy"):
        text += (
            f"\n\nOf {runs['runs']} runs of these with other seeds {len(runs['alarms'])} raised an "
            f"alarm; the largest error of the others is {runs['largest']:.1e}."
        )
    return text


def with_table(text: str, section: str) -> str:
    """Return the page with another section between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    main()
