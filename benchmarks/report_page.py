"""The parts of every benchmark's page: the circumstances, numbers with their spread, a table that
no hand has written, and a picture of bars.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from matplotlib.figure import Figure

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
OURS, YARDSTICK, OTHERS = "#d1495b", "#3d405b", "#a3a9b5"


def circumstances(packages: Sequence[str]) -> dict[str, str]:
    """Return date, machine, load and versions, taken just before a measurement."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    kernel = f"{platform.system()} {platform.release()}"
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {_processor()}, {kernel}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()}, {versions}",
    }


def write_result(path: Path, result: Any) -> None:
    """Write what was measured as JSON, a line for each case, so that changes can be read."""
    if isinstance(result, dict):
        entries = [f"{json.dumps(key)}: {_in_lines(value)}" for key, value in result.items()]
        text = "{\n" + ",\n".join(entries) + "\n}"
    else:
        text = _in_lines(result)
    path.write_text(text + "\n")


def _in_lines(value: Any) -> str:
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(p, (dict, list)) for p in parts):
        return json.dumps(value)
    if isinstance(value, dict):
        entries = [f" {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    return "[\n" + ",\n".join(f" {json.dumps(each)}" for each in value) + "\n]"


def told(facts: Mapping[str, str]) -> str:
    """The circumstances as a sentence for the page."""
    machine = facts["machine"].partition(", Linux")[0]
    return f"{facts['date']}, {machine}, load average {facts['load']}; {facts['versions']}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: Path, text: str) -> None:
    """Put `text` between the markers of a page, in place of what stands there."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def publish(folder: Path, parts: Callable[[Any], Iterable[str]]) -> None:
    """Turn result.json of a benchmark into its README.md: the parts, and the circumstances."""
    result = json.loads((folder / "result.json").read_text())
    text = "\n\n".join(part for part in (*parts(result), told(result["circumstances"])) if part)
    fill(folder / "README.md", text)
    print(text)


def ratios(times_s: Sequence[float], yardstick_s: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(times_s, yardstick_s, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, the least and the most; a dash where there is nothing."""
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def quartiles(values: Sequence[float], form: str = ".2f", mark: str = "") -> str:
    """Return the median and the quartiles. Args: mark: around the median, for bold type."""
    low, middle, high = quantiles(values)
    return f"{mark}{middle:{form}}{mark} ({low:{form}} to {high:{form}})"


def bars(
    picture: Path,
    title: str,
    unit: str,
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    yardstick: str,
) -> None:
    """Draw (low, middle, high) of every candidate, one panel a group."""
    figure = Figure(figsize=(4.2 * len(groups), 3.4), layout="constrained")
    figure.suptitle(title)
    for axes, (group, values) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        names = list(values)[::-1]
        low, middle, high = zip(*(values[name] for name in names), strict=True)
        below = [b - a for a, b in zip(low, middle, strict=True)]
        above = [b - a for a, b in zip(middle, high, strict=True)]
        colours = [{"Shoal": OURS, yardstick: YARDSTICK}.get(name, OTHERS) for name in names]
        drawn = axes.barh(
            names,
            middle,
            xerr=[below, above],
            color=colours,
            error_kw={"elinewidth": 1, "capsize": 3},
        )
        axes.bar_label(
            drawn, [f"{value:.2f}" for value in middle], label_type="center", color="white"
        )
        axes.set_title(group, fontsize=10)
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
