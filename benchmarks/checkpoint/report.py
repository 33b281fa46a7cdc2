"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
ROWS = {
    "torch.save": "`torch.save` by rank 0 over the file before, fsynced: training stands still",
    "torch.save, new file": "the same to a new file; then the file before is removed",
    "waiting": "Shoal, waiting: written by both ranks, hashed, fsynced, renamed, read back",
    "beside, stall": "**Shoal, beside training: the stall**",
    "beside, the rest": "what is left to wait for after three steps",
    "restore": "restore: verified against its hashes, then loaded by both ranks",
    "torch.load": "`torch.load` by both ranks",
}


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    found = result["found"]
    rows = []
    for key, name in ROWS.items():
        ratios = [a / b for a, b in zip(found[key], found["torch.save"], strict=True)]
        yardstick = found["torch.load" if key == "restore" else "torch.save"]
        processor = f"{min(found[f'{key}, processor']):.2f}"
        fastest = f"{min(found[key]) / min(yardstick):.2f}"
        rows.append([name, _spread(found[key], 2), _spread(ratios, 2), fastest, processor])
    slowdown = [
        a / b for a, b in zip(found["beside, steps meanwhile"], found["steps"], strict=True)
    ]
    sizes = {key: found[f"bytes, {key}"][0] / 2**20 for key in ("tensors", "torch.save", "Shoal")}
    text = "\n\n".join(
        [
            table(
                [
                    f"median of {len(slowdown)} rounds (min to max)",
                    "seconds",
                    "share of `torch.save`",
                    "fastest / torch's fastest",
                    "processor, busiest rank",
                ],
                rows,
            ),
            f"Steps beside a save take {_spread(slowdown, 2)} of the time of undisturbed ones. The "
            "state: "
            f"{sizes['tensors']:.0f} MiB of tensors; {sizes['torch.save']:.0f} MiB from "
            "`torch.save`, "
            f"{sizes['Shoal']:.0f} MiB from Shoal.",
            _memory(result["memory"]),
            told(result["circumstances"]),
        ]
    )
    fill(HERE / "README.md", text)
    print(text)


def _memory(found: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        [f"**`shoal export`, saved by {strategy} on 2 ranks**", *_tensors(of, "export")]
        for strategy, of in found.items()
    ]
    of = next(iter(found.values()))
    rows.append(
        [
            "`model.weights` from it, beside the model: private memory",
            *_tensors(of, "load, private"),
        ]
    )
    rows.append(["the same, with the pages of the file that it maps", *_tensors(of, "load")])
    largest_mib = of["largest tensor"] / 2**20
    sizes = f"largest tensor {largest_mib:.0f} MiB, model {of['model'] / 2**20:.0f} MiB"
    return table(
        [f"peak above what the process held before; {sizes}", "MiB", "largest tensors"], rows
    )


def _tensors(of: Mapping[str, int], what: str) -> list[str]:
    return [f"{of[what] / 2**20:.1f}", f"{of[what] / of['largest tensor']:.2f}"]


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
