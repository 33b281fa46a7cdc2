"""Turns predictions.json and result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
MIB = 2**20


class Compared(NamedTuple):
    """A case with both numbers of one quantity."""

    label: str
    model: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    predictions = json.loads((HERE / "predictions.json").read_text())
    result = json.loads((HERE / "result.json").read_text())
    cases = [*zip(predictions, result["cases"], strict=True)]
    times = [c for case in cases if (c := _compared(case, "step_s", "least_s"))]
    memory = [c for case in cases if (c := _compared(case, "peak_bytes", "peak_bytes"))]
    parts = [
        _summary(times, memory),
        _rows(cases),
        _left_out(cases),
        told(result["circumstances"]),
    ]
    text = "\n\n".join(part for part in parts if part)
    fill(HERE / "README.md", text)
    print(text)


def _label(case: dict[str, Any]) -> str:
    more = f" x {case['accumulate']} accumulated" if case["accumulate"] > 1 else ""
    return f"{case['model']} `{case['strategy']}` on {case['ranks']}{more}"


def _rounds(case: dict[str, Any], name: str) -> list[float]:
    return [one[name] for one in case["rounds"] if name in one]


def _compared(
    case: tuple[dict[str, Any], dict[str, Any]], predicted: str, measured: str
) -> Compared | None:
    prediction, found = case
    rounds = _rounds(found, measured)
    if predicted not in prediction or not rounds:
        return None
    if measured == "peak_bytes" and prediction["strategy"].startswith("server"):
        return None  # a worker's values lie in shared memory, which the count leaves out
    return Compared(_label(prediction), prediction["model"], prediction[predicted], min(rounds))


def _summary(times: Sequence[Compared], memory: Sequence[Compared]) -> str:
    head = ["predicted / measured - 1", "cases", "mean of absolute values", "bias", "p90", "worst"]
    rows = [_summary_row("seconds of a step", times), _summary_row("peak of memory", memory)]
    for model in dict.fromkeys(one.model for one in times):
        rows.append(_summary_row(f"seconds, {model}", [t for t in times if t.model == model]))
    right, pairs = _order(times)
    order = f"Of {pairs} pairs of plans of one model whose times differ by more than 5 %, {right} "
    return f"{table(head, rows)}\n\n{order}are predicted in the right order ({right / pairs:.0%})."


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
    head = [
        "case",
        "predicted",
        "measured",
        "error",
        "spread",
        "peak predicted",
        "measured",
        "error",
    ]
    rows = []
    for prediction, found in cases:
        if "step_s" not in prediction or not (times := _rounds(found, "least_s")):
            continue
        peak = min(_rounds(found, "peak_bytes"))
        rows.append(
            [
                _label(prediction),
                f"{1e3 * prediction['step_s']:.1f} ms",
                f"{1e3 * min(times):.1f} ms",
                f"{prediction['step_s'] / min(times) - 1:+.0%}",
                f"{max(times) / min(times) - 1:.0%}",
                f"{prediction['peak_bytes'] / MIB:.2f} MiB",
                f"{peak / MIB:.2f} MiB",
                f"{prediction['peak_bytes'] / peak - 1:+.1%}",
            ]
        )
    return table(head, rows)


def _left_out(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    lines = []
    for prediction, found in cases:
        reasons = [prediction.get("refused")]
        reasons += [r.get("refused") or r.get("failed") for r in found["rounds"]]
        if "step_s" in prediction and _rounds(found, "least_s"):
            continue
        reason = next((reason for reason in reasons if reason), "not measured")
        lines.append(f"- {_label(prediction)}: {reason.splitlines()[0]}")
    return "Left out:\n" + "\n".join(lines) if lines else ""


if __name__ == "__main__":
    main()
