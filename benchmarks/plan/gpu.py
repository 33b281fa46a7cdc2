"""Sets what the planner foretells for one GPU from its data sheet beside what a step takes there.

python -m benchmarks.plan.gpu           on a machine with a GPU: measures, and writes gpu.json
python -m benchmarks.plan.gpu --page    the table of gpu.md: plans anew, and measures nothing

Plans need no GPU, and no result of a measurement goes into them."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import shoal
from benchmarks.gpu.tasks import Task, images, resnet50, text
from benchmarks.report_page import circumstances, fill, table, told, write_result
from shoal.planner.find_machine import gpu_by_name
from shoal.platform.torchvision_import import torchvision
from shoal.run.supervised import supervised

HERE = Path(__file__).parent
RESULT = HERE / "gpu.json"
STEPS = 6
HEAD = [
    "model, batch",
    "precision",
    "strategy",
    "a step: plan",
    "measured",
    "memory: plan",
    "measured",
]


CASES = {
    "ViT-B/16, 128": images(torchvision.models.vit_b_16, 128, 224, STEPS),
    "ResNet-50, 256": images(resnet50, 256, 224, STEPS),
    "GPT-2 350M, 8 x 1024": text("GPT-2 350M", (24, 1024, 16), 8, STEPS, False),
    "GPT-2 124M, 16 x 1024": text("GPT-2 124M", (12, 768, 12), 16, STEPS, False),
}


def main() -> None:
    if sys.argv[1:] == ["--page"]:
        fill(HERE / "gpu.md", page(json.loads(RESULT.read_text())))
        return
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "torchvision", "shoal")),
        "gpu": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "measured": list(measured()),
    }
    write_result(RESULT, result)


def measured() -> Iterator[dict[str, Any]]:
    """Yield the least time of a step, and the most memory, of each case."""
    for name, case in CASES.items():
        for precision in ("fp32", "bf16"):
            for strategy in ("single", "recompute"):
                gc.collect()
                torch.cuda.empty_cache()
                step_s, memory_bytes = _steps(case, precision, strategy)
                found = {"case": name, "precision": precision, "strategy": strategy}
                yield found | {"step_s": step_s, "memory_bytes": memory_bytes}


def _steps(case: Task, precision: Any, strategy: str) -> tuple[float, int]:
    run = shoal.init(strategy, precision=precision, guards=False, announce=lambda _: None)
    model = case.model().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    compute_loss = supervised(case.loss, model)
    batch = run.to_device(case.batch())
    times_s = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        optimizer.zero_grad()
        run.forward_backward(compute_loss, *batch)
        optimizer.step()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s), torch.cuda.max_memory_allocated()


def planned(case: Task, precision: str, machine: Path) -> dict[str, tuple[float, float]]:
    """Return strategy -> seconds of a step, and bytes of memory, from the data sheet."""
    with torch.device("meta"):
        model = case.model()
    is_half = precision == "bf16"

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        # Tensors without memory count as the CPU's.
        with torch.autocast("cpu", torch.bfloat16) if is_half else nullcontext():
            return case.loss(model(x), y)

    optimizer = torch.optim.AdamW(model.parameters())
    found = shoal.plan(model, optimizer, case.batch(), compute_loss, machine=str(machine))
    return {p.strategy: (p.seconds, p.memory.total) for p in found.plans.fitting}


def page(result: dict[str, Any]) -> str:
    with TemporaryDirectory() as folder:
        machine = Path(folder) / "gpu.json"
        gpu_by_name(result["gpu"], result["memory_bytes"]).save(machine)
        plans = {
            (name, precision): planned(case, precision, machine)
            for name, case in CASES.items()
            for precision in ("fp32", "bf16")
        }
    rows = []
    for found in result["measured"]:
        seconds, memory = plans[found["case"], found["precision"]][found["strategy"]]
        rows.append(
            [
                *(found["case"], found["precision"], found["strategy"]),
                *(f"{seconds * 1e3:.0f} ms", f"{found['step_s'] * 1e3:.0f} ms"),
                *(f"{memory / 2**30:.1f} GiB", f"{found['memory_bytes'] / 2**30:.1f} GiB"),
            ]
        )
    return "\n\n".join([table(HEAD, rows), told(result["circumstances"])])


if __name__ == "__main__":
    main()
