"""Turns predictions.json and result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report_page import publish, table

HERE = Path(__file__).parent
CORES = json.loads((HERE / "machine.json").read_text())["cores"]


class Compared(NamedTuple):
    """A case with both numbers of one quantity.

    Attributes:
        latest: what plans are ranked by.
        clock: seconds by the clock.
    """

    label: str
    model: str
    predicted: float
    measured: float
    latest: float = 0.0
    clock: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def page(result: dict[str, Any]) -> Iterator[str]:
    predictions = json.loads((HERE / "predictions.json").read_text())
    cases = [*zip(predictions, result["cases"], strict=True)]
    times = [one for case in cases if (one := _time(case))]
    yield _summary(times, [one for case in cases if (one := _memory(case))])
    yield _rows(cases)
    yield _left_out(cases)


def _label(case: dict[str, Any]) -> str:
    more = f" x {case['accumulate']} accumulated" if case["accumulate"] > 1 else ""
    return f"{case['model']} `{case['strategy']}` on {case['ranks']}{more}"


def _rounds(case: dict[str, Any], name: str) -> list[float]:
    return [one[name] for one in case["rounds"] if name in one]


def _memory(case: tuple[dict[str, Any], dict[str, Any]]) -> Compared | None:
    prediction, found = case
    rounds = [size for size in _rounds(found, "peak_bytes") if size]
    if "peak_bytes" not in prediction or not rounds:
        return None  # a server's values lie in shared memory, which the count leaves out
    return Compared(_label(prediction), prediction["model"], prediction["peak_bytes"], min(rounds))


def _time(case: tuple[dict[str, Any], dict[str, Any]]) -> Compared | None:
    """Return the predicted and the measured seconds of a step, at the speed of the calibration.

    Measured is processor time: that of the slowest rank, or of all ranks over the cores that they
    share. Ranks of a pipeline are idle by design, so there the busy time of a rank is compared.
    Ranks wait for servers, whose processor time is not theirs, so there it is the clock's.
    """
    prediction, found = case
    if "step_s" not in prediction or not _rounds(found, "ratio_sum") or prediction["ranks"] == 1:
        return None
    predicted = prediction["step_s"]
    # The machine's speed differs from minute to minute: times are those at which the reference step
    # beside them takes what is predicted for it.
    slowest, shared = (
        prediction["reference_s"] * median(_rounds(found, name))
        for name in ("ratio_slowest", "ratio_sum")
    )
    clock = prediction["reference_s"] * median(_rounds(found, "ratio_wall"))
    measured = max(slowest, shared / CORES)
    if prediction["strategy"].startswith("pipeline"):
        predicted *= 1 - prediction["idle"]
        measured = shared / prediction["ranks"]
    elif prediction["strategy"].startswith("server"):
        measured = clock
    ranked = prediction["latest_s"], clock
    return Compared(_label(prediction), prediction["model"], predicted, measured, *ranked)


def _summary(times: Sequence[Compared], memory: Sequence[Compared]) -> str:
    head = ["predicted / measured - 1", "cases", "mean of absolute values", "bias", "p90", "worst"]
    rows = [_summary_row("seconds of a step", times), _summary_row("peak of memory", memory)]
    for model in dict.fromkeys(one.model for one in times):
        rows.append(_summary_row(f"seconds, {model}", [t for t in times if t.model == model]))
    right, pairs = _order(times)
    order = f"Of {pairs} pairs of plans of one model whose times differ by more than 5 %, {right} "
    share = f"{right / pairs:.0%}"
    text = f"{order}are predicted in the right order ({share}). {_regret(times)}"
    return f"{table(head, rows)}\n\n{text}"


def _regret(times: Sequence[Compared]) -> str:
    """Return how much longer the plans take that are ranked first than the fastest.

    By the clock: the processor time of servers is not counted among that of ranks.
    """
    groups: dict[tuple[str, str], list[Compared]] = defaultdict(list)
    for one in times:
        name, _, ranks = one.label.partition("` on ")
        if "`local" not in name:  # its numbers are not those of one device
            groups[one.model, ranks].append(one)
    lost = []
    for plans in groups.values():
        if len(plans) > 1:
            chosen = min(plans, key=lambda plan: plan.latest)
            fastest = min(plan.clock for plan in plans)
            lost.append((chosen.clock / fastest - 1, chosen.label))
    mean, (most, label) = sum(share for share, _ in lost) / len(lost), max(lost)
    return (
        "Of the exact plans of one model on as many ranks, the one that the planner ranks first "
        f"takes {mean:.1%} longer by the clock than the fastest (mean of {len(lost)}; at most "
        f"{most:.1%}, {label})."
    )


def _summary_row(name: str, compared: Sequence[Compared]) -> list[str]:
    errors = [one.error for one in compared]
    sizes = sorted(map(abs, errors))
    worst = max(compared, key=lambda one: abs(one.error))
    return [
        name,
        str(len(errors)),
        f"{sum(sizes) / len(sizes):.1%}",
        f"{sum(errors) / len(errors):+.1%}",
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}",
        f"{worst.error:+.1%} ({worst.label})",
    ]


def _order(times: Sequence[Compared]) -> tuple[int, int]:
    """Count pairs of plans of one model that are told apart rightly, and all such pairs."""
    right = pairs = 0
    for one, other in combinations(times, 2):
        ratio = one.measured / other.measured
        if one.model == other.model and not 1 / 1.05 <= ratio <= 1.05:
            pairs += 1
            right += (one.predicted > other.predicted) == (ratio > 1)
    return right, pairs


def _rows(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    head = ["case", "predicted, ms", "measured", "error", "error of the peak of memory"]
    rows = []
    for case in cases:
        time, memory = _time(case), _memory(case)
        if time is None and memory is None:
            continue
        cells = ["-"] * 4
        if time is not None:
            cells[:3] = _ms(time.predicted), _ms(time.measured), f"{time.error:+.0%}"
        if memory is not None:
            cells[3] = f"{memory.error:+.1%}"
        rows.append([_label(case[0]), *cells])
    return table(head, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _left_out(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    lines = []
    for prediction, found in cases:
        reasons = [prediction.get("refused")]
        reasons += [r.get("refused") or r.get("failed") for r in found["rounds"]]
        if _time((prediction, found)) or _memory((prediction, found)):
            continue
        reason = next((reason for reason in reasons if reason), "not measured")
        lines.append(f"- {_label(prediction)}: {reason.splitlines()[0]}")
    return "Left out:\n" + "\n".join(lines) if lines else ""


if __name__ == "__main__":
    publish(HERE, page)
