"""Time of a step of AdamW on shards as DTensors, and as plain tensors.

python -m benchmarks.zero.optimizer_step

Two ranks and a small GPT, whose kernels are short beside torch's dispatcher. Both ways take turns;
processor time of rank 0, medians of 30 steps, and of five turns with their quartiles.
"""

from __future__ import annotations

import time
from statistics import median, quantiles
from unittest.mock import patch

import torch
import torch.distributed as dist

import shoal
from benchmarks.plan.cases import MODELS, PlannedCase, loss, make_optimizer, model_of, samples_of
from shoal.run import prepared
from shoal.testing import world

STRATEGIES = ("zero1", "zero3", "tensor=2")
TURNS, WARM, STEPS = 5, 10, 30


def seconds(strategy: str, as_plain_tensors: bool) -> tuple[float, float]:
    """Return the seconds of a step, and of its optimizer. Collective."""
    torch.set_num_threads(1)
    run = shoal.init(strategy, announce=lambda _: None)
    case = PlannedCase("gpt", strategy, 2)
    model = model_of(case)
    optimizer = make_optimizer(model)
    batch = samples_of(case, MODELS["gpt"].batch)[:]
    with patch.object(
        prepared,
        "step_local_shards",
        prepared.step_local_shards if as_plain_tensors else lambda _: None,
    ):
        model, optimizer = run.prepare(model, optimizer)
    samples = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        start_s = time.process_time()
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: loss(model(x), y), *run.share(batch))
        stepped_s = time.process_time()
        optimizer.step()
        end_s = time.process_time()
        samples.append((end_s - start_s, end_s - stepped_s))
    whole, step = zip(*samples[WARM:], strict=True)
    return median(whole), median(step)


def main() -> None:
    """Print a table, a row for each strategy."""
    print("| strategy | AdamW on DTensors | on plain tensors | ratio | ratio of the whole step |")
    print("| --- | --: | --: | --: | --: |")
    for strategy in STRATEGIES:
        turns = [
            tuple(world.run(2, seconds, strategy, plain)[0] for plain in (False, True))
            for _ in range(TURNS)
        ]
        before, after = (median(turn[way][1] for turn in turns) for way in (0, 1))
        ratios = (spread([plain[i] / d[i] for d, plain in turns]) for i in (1, 0))
        print(
            f"| `{strategy}` | {before * 1e3:.1f} ms | {after * 1e3:.1f} ms | "
            f"{' | '.join(ratios)} |",
            flush=True,
        )


def spread(ratios: list[float]) -> str:
    """Return the median of some ratios with their quartiles."""
    low, middle, high = quantiles(ratios, n=4)
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
