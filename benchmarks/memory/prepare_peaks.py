"""`python -m benchmarks.memory.prepare_peaks`: the peak of a rank up to the first step, with and
without `shoal.empty_weights`.

Each cell is a world of its own. The peak is that of the process (VmHWM) less what it had before the
model was built, so it counts gathered layers, messages and what malloc keeps, and in the first step
of a pipeline its gradients.
"""

from __future__ import annotations

import resource
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.report_page import circumstances, fill, table, told
from shoal.testing import world

BLOCKS, WIDTH = 12, 3072
CASES = [("zero3", 2), ("zero3", 4), ("tensor=2", 2), ("tensor=4", 4), ("pipeline=4", 4)]


def peak_mib(strategy: str, is_empty: bool) -> float:
    """Return by how many MiB the peak of this process grows up to the first step."""
    run = shoal.init(strategy, announce=str, guards=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with shoal.empty_weights() if is_empty else nullcontext():
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
        model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
    data = TensorDataset(torch.ones(8, WIDTH), torch.ones(8, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    if strategy.startswith("pipeline"):  # it is divided in the first step
        for x, y in loader:
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Measure all cases, and write the table of prepare_peaks.md."""
    facts = circumstances(["torch"])
    layer = WIDTH * WIDTH * 4 / 2**20
    rows = []
    for strategy, ranks in CASES:
        whole, empty = (max(world.run(ranks, peak_mib, strategy, each)) for each in (False, True))
        cells = BLOCKS * layer / ranks, whole, empty
        rows.append([f"`{strategy}`", f"{ranks}", *(f"{mib:.0f}" for mib in cells)])
    head = ["MiB", "ranks", "a rank's share", "peak", "peak with `empty_weights`"]
    model = f"{BLOCKS} layers of {layer:.0f} MiB, {BLOCKS * layer:.0f} MiB in all."
    page = Path(__file__).with_suffix(".md")
    fill(page, f"{table(head, rows)}\n\n{model} {told(facts)}")


if __name__ == "__main__":
    main()
