"""Models, batches and the work of a step, for a GPU and in small for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.models import build
from shoal.platform.torchvision_import import torchvision

resnet18, resnet50 = torchvision.models.resnet18, torchvision.models.resnet50

PEAKS = {
    # Dense bf16 on tensor cores, from NVIDIA's data sheets.
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}
"""FLOP/s by a part of the device's name; the first that fits counts."""


@dataclass(frozen=True)
class Task:
    """A model, its batch, and how a step is taken.

    Attributes:
        model: makes it, on the CPU.
        batch: makes the inputs and targets of a step, on the CPU.
        loss: of outputs and targets.
        adamw: AdamW; SGD with momentum otherwise.
        steps: of an epoch.
        alone: candidates do not fit in memory together.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    adamw: bool
    steps: int
    alone: bool = False
    channels_last: bool = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = next(model.parameters()).is_cuda
        if self.adamw:
            return torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), fused=fused)
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)

    def flops(self) -> int:
        """Return the floating-point operations of a step, counted on tensors without memory."""
        with torch.device("meta"):
            model = self.model()
        x, y = (tensor.to("meta") for tensor in self.batch())
        counter = FlopCounterMode(display=False)
        with counter:
            self.loss(model(x), y).backward()
        return counter.get_total_flops()


def images(model: Callable[[], nn.Module], rows: int, side: int, steps: int) -> Task:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3, side, side), torch.randint(0, 1000, (rows,))

    name = f"ResNet-{50 if model is resnet50 else 18}, {rows} x {side} x {side}"
    return Task(name, model, batch, F.cross_entropy, False, steps, channels_last=True)


def text(name: str, shape: tuple[int, int, int], rows: int, steps: int, alone: bool) -> Task:
    """Return a task for a GPT of (layers, width, heads)."""
    layers, width, heads = shape
    words, time = (50304, 1024) if width > 64 else (64, 16)
    options = {"layers": layers, "width": width, "heads": heads}

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, words, (rows, time + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    return Task(
        f"{name}, {rows} x {time} tokens",
        lambda: build("gpt", num_classes=words, input_shape=(time,), options=options),
        batch,
        loss,
        True,
        steps,
        alone,
    )


def tasks(smoke: bool) -> list[Task]:
    """Return all tasks; in small with `smoke`, to show that the programs run."""
    if smoke:
        return [
            images(resnet18, 2, 32, 2),
            text("GPT of 2 layers", (2, 32, 2), 2, 2, False),
            text("GPT of 2 layers, alone", (2, 32, 2), 4, 2, True),
        ]
    return [
        images(resnet50, 256, 224, 20),
        text("GPT-2 124M", (12, 768, 12), 16, 20, False),
        text("GPT-2 1.5B", (48, 1600, 25), 4, 10, True),
    ]


def peak_flops(device: torch.device) -> tuple[float, str]:
    """Return the FLOP/s that a share is taken of, and where the number is from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak, f"the data sheet's {peak / 1e12:.0f} TFLOP/s (bf16) of {name}"
    return measured_flops(device), "a matrix product measured here"


def measured_flops(device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product."""
    import time

    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(5):
        wait_for(device)
        started_s = time.perf_counter()
        a @ a
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * size**3 / best_s


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
