"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report_page import publish, ratios, spread, table

ROWS = {
    "torch.save": "`torch.save` by rank 0 over the file before, fsynced: training stands still",
    "torch.save, new file": "the same to a new file; then the file before is removed",
    "waiting": "Shoal, waiting: written by both ranks, hashed, fsynced, renamed, read back",
    "beside, stall": "**Shoal, beside training: the stall**",
    "beside, the rest": "what is left to wait for after three steps",
    "restore": "restore: verified against its hashes, then loaded by both ranks",
    "torch.load": "`torch.load` by both ranks",
}
HEAD = ["seconds", "share of `torch.save`", "fastest / torch's fastest", "processor, busiest rank"]


def page(result: dict[str, Any]) -> Iterator[str]:
    found = result["found"]
    rows = []
    for key, name in ROWS.items():
        shares = spread(ratios(found[key], found["torch.save"]))
        yardstick = found["torch.load" if key == "restore" else "torch.save"]
        fastest = f"{min(found[key]) / min(yardstick):.2f}"
        processor = f"{min(found[f'{key}, processor']):.2f}"
        rows.append([name, spread(found[key]), shares, fastest, processor])
    yield table([f"median of {len(found['steps'])} rounds (min to max)", *HEAD], rows)
    slowdown = spread(ratios(found["beside, steps meanwhile"], found["steps"]))
    sizes = {key: found[f"bytes, {key}"][0] / 2**20 for key in ("tensors", "torch.save", "Shoal")}
    yield (
        f"Steps beside a save take {slowdown} of the time of undisturbed ones. The state: "
        f"{sizes['tensors']:.0f} MiB of tensors; {sizes['torch.save']:.0f} MiB from `torch.save`, "
        f"{sizes['Shoal']:.0f} MiB from Shoal."
    )
    yield _memory(result["memory"])


def _memory(found: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        [f"**`shoal export`, saved by {strategy} on 2 ranks**", *_tensors(of, "export")]
        for strategy, of in found.items()
    ]
    of = next(iter(found.values()))
    private = "`model.weights` from it, beside the model: private memory"
    rows.append([private, *_tensors(of, "load, private")])
    rows.append(["the same, with the pages of the file that it maps", *_tensors(of, "load")])
    largest, model = of["largest tensor"] / 2**20, of["model"] / 2**20
    sizes = f"largest tensor {largest:.0f} MiB, model {model:.0f} MiB"
    head = f"peak above what the process held before; {sizes}"
    return table([head, "MiB", "largest tensors"], rows)


def _tensors(of: Mapping[str, int], what: str) -> list[str]:
    return [f"{of[what] / 2**20:.1f}", f"{of[what] / of['largest tensor']:.2f}"]


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
