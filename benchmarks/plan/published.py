"""Plans of runs that others have published, by constants of a datasheet that were fixed beforehand.

python -m benchmarks.plan.published

Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", arXiv:2104.04473, 2021, tables 1 and 2: GPT models of 1.7 to 1,008 billion parameters
on 32 to 3,072 A100s of 80 GB, eight on a host, sequences of 2,048 tokens, mixed precision,
activations recomputed. Each host has eight links of 200 Gbit/s, and NVLink inside.
"""

from __future__ import annotations

import sys
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shoal import models
from shoal.costs.cluster import Cluster, Host, Link
from shoal.costs.machine import PRESETS
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model
from shoal.platform.torch_private.fake_tensors import fake_tensors

TOKENS, VOCABULARY, RANKS_PER_HOST = 2048, 51_200, 8
MACHINE = PRESETS["a100-80gb"]
INSIDE, OUTSIDE = Link(300e9), Link(8 * 25e9, latency_s=5e-6)
"""One way: NVLink of a GPU; the eight links of 200 Gbit/s of a host, with the latency that the
example in docs/plan.md has.
"""


class PublishedRun(NamedTuple):
    """A row of the paper's table.

    Attributes:
        billions: of parameters.
        batch: sequences of a step.
        tflops: teraFLOP/s of each GPU that were reached.
        asked: sequences of a micro-batch, in table 2. Table 1 has none: 1 in pipelines, else 4.
        data: how the batch is shared out.
    """

    billions: float
    heads: int
    width: int
    layers: int
    tensor: int
    pipeline: int
    ranks: int
    batch: int
    tflops: float
    asked: int = 0
    data: str = "ddp"

    @property
    def local_batch(self) -> int:
        return self.batch * self.tensor * self.pipeline // self.ranks

    @property
    def micro(self) -> int:
        return self.asked or (1 if self.pipeline > 1 else 4)

    @property
    def strategy(self) -> str:
        words = ["recompute"]
        if self.tensor > 1:
            words.append(f"tensor={self.tensor}")
        if self.pipeline > 1:
            words.append(f"pipeline={self.pipeline},microbatches={self.local_batch // self.micro}")
        return ",".join([*words, self.data])

    @property
    def accumulate(self) -> int:
        return 1 if self.pipeline > 1 else self.local_batch // self.micro

    def flops(self) -> float:
        """Return the FLOPs of a step by the paper's formula (3), with recomputation."""
        whole = 96 * self.batch * TOKENS * self.layers * self.width**2
        attention = TOKENS / (6 * self.width)
        return whole * (1 + attention + VOCABULARY / (16 * self.layers * self.width))


RUNS = (
    PublishedRun(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    PublishedRun(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    PublishedRun(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    PublishedRun(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    PublishedRun(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    PublishedRun(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    PublishedRun(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    PublishedRun(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    PublishedRun(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    PublishedRun(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    PublishedRun(174.6, 96, 12288, 96, 8, 12, 384, 1536, 153, 1),
    PublishedRun(174.6, 96, 12288, 96, 8, 12, 768, 1536, 149, 1),
    PublishedRun(174.6, 96, 12288, 96, 8, 12, 1536, 1536, 141, 1),
    PublishedRun(174.6, 96, 12288, 96, 1, 1, 384, 1536, 144, 4, "zero3"),
    PublishedRun(174.6, 96, 12288, 96, 1, 1, 768, 1536, 88, 2, "zero3"),
    PublishedRun(174.6, 96, 12288, 96, 1, 1, 1536, 1536, 44, 1, "zero3"),
    PublishedRun(529.6, 128, 20480, 105, 8, 35, 560, 2240, 171, 1),
    PublishedRun(529.6, 128, 20480, 105, 8, 35, 1120, 2240, 167, 1),
    PublishedRun(529.6, 128, 20480, 105, 8, 35, 2240, 2240, 159, 1),
    PublishedRun(529.6, 128, 20480, 105, 1, 1, 640, 2560, 138, 4, "zero3"),
    PublishedRun(529.6, 128, 20480, 105, 1, 1, 1120, 2240, 98, 2, "zero3"),
    PublishedRun(529.6, 128, 20480, 105, 1, 1, 2240, 2240, 48, 1, "zero3"),
)


def predicted_tflops(run: PublishedRun) -> float:
    """Return the teraFLOP/s of each GPU that a plan predicts."""
    options = {"width": run.width, "layers": run.layers, "heads": run.heads}
    # As Megatron-LM, and unlike autocast, which leaves sums of activations in float32.
    torch.set_default_dtype(torch.bfloat16)
    with fake_tensors():
        model = models.build("gpt", VOCABULARY, (TOKENS,), options)
    torch.set_default_dtype(torch.float32)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), x.flatten())

    work = trace_model(model, loss, lambda m: torch.optim.AdamW(m.parameters()), (tokens,))
    memory = RANKS_PER_HOST * MACHINE.memory_bytes
    hosts = (
        Host(f"h{number}", RANKS_PER_HOST, memory, INSIDE, OUTSIDE)
        for number in range(run.ranks // RANKS_PER_HOST)
    )
    workload = Workload(work, model, run.batch, run.accumulate)
    planner = Planner(workload, MACHINE, Cluster(tuple(hosts), {}), memory_limit=float("inf"))
    return run.flops() / planner.plan(run.strategy).seconds / run.ranks / 1e12


def main() -> None:
    """Print a table, a row for each run; with numbers, those rows alone."""
    print("| parameters | ranks | strategy | reached | predicted | error |")
    print("| --: | --: | --- | --: | --: | --: |")
    errors = []
    chosen = [RUNS[int(number)] for number in sys.argv[1:]] or RUNS
    for run in chosen:
        predicted = predicted_tflops(run)
        errors.append(predicted / run.tflops - 1)
        print(
            f"| {run.billions:,} billion | {run.ranks:,} | `{run.strategy}` | {run.tflops} | "
            f"{predicted:.0f} | {errors[-1]:+.0%} |",
            flush=True,
        )
    mean_of_absolute = mean(map(abs, errors))
    print(
        f"\nmean of the errors {mean(errors):+.0%}, of their absolute values {mean_of_absolute:.0%}"
    )


if __name__ == "__main__":
    main()
