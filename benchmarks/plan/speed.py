"""Time and memory of the planner itself, each case in a process of its own.

python -m benchmarks.plan.speed
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shoal import models
from shoal.costs.cluster import Cluster, Host, Link
from shoal.costs.machine import PRESETS
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model
from shoal.platform.torch_private.fake_tensors import fake_tensors

INSIDE, LINK = Link(450e9), Link(50e9)


class SpeedCase(NamedTuple):
    """A GPT, and the ranks of its plan, eight on a host."""

    layers: int
    width: int
    heads: int
    tokens: int
    ranks: int
    batch: int


CASES = {
    "12 blocks, 64 ranks": SpeedCase(12, 768, 12, 1024, 64, 512),
    "12 blocks, 16,384 ranks": SpeedCase(12, 768, 12, 1024, 16_384, 65_536),
    "80 blocks, 65 billion parameters, 16 ranks": SpeedCase(80, 8192, 64, 4096, 16, 64),
}


def measure(case: SpeedCase) -> str:
    """Return a line of a table: seconds of the trace and of the search, lines, memory."""
    shape = (case.tokens,)
    options = {"width": case.width, "layers": case.layers, "heads": case.heads}
    with fake_tensors():
        model = models.build("gpt", 50_304, shape, options)
    tokens = torch.zeros(1, *shape, dtype=torch.long)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), x.flatten())

    start_s = time.process_time()
    work = trace_model(model, loss, lambda m: torch.optim.AdamW(m.parameters()), (tokens,))
    traced_s = time.process_time()
    machine = PRESETS["h100"]
    hosts = (Host(f"h{n}", 8, machine.memory_bytes, INSIDE, LINK) for n in range(case.ranks // 8))
    plans = Planner(Workload(work, model, case.batch), machine, Cluster(tuple(hosts), {})).search()
    end_s = time.process_time()
    fitting = len(plans.fitting) + len(plans.slower)
    lines = fitting + len(plans.too_large) + len(plans.refused)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{traced_s - start_s:.1f} s | {lines:,} | {len(plans.fitting)} of {fitting} | "
        f"{end_s - traced_s:.1f} s | {peak_gib:.2f} GiB |"
    )


def main() -> None:
    """Print a table of all cases; with a name, the figures of one."""
    if len(sys.argv) > 1:
        print(measure(CASES[sys.argv[1]]))
        return
    print("| case | trace | lines | simulated, of those that fit | search | memory |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.plan.speed", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {name} | {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
