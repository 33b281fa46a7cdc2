"""Bytes that lean optimizers save, counted tensor by tensor; writes the table of docs/strategies/lean.md.

python -m benchmarks.memory.lean
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.page import circumstances, fill, table, told
from shoal.adamw8bit import AdamW8bit
from shoal.comm.norm import local
from shoal.models import build
from shoal.run import begin
from shoal.testing import world

PAGE = Path(__file__).parents[2] / "docs" / "strategies" / "lean.md"
OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "AdamW8bit": AdamW8bit, "Adafactor": torch.optim.Adafactor}
TOKENS, LENGTH = 256, 32
MIB = 2**20


class Bytes(NamedTuple):
    """What rank 0 holds."""

    parameters: int
    gradients: int  # at their peak, as parameters hold them
    state: int
    numbers: int  # parameters of the whole model


def main() -> None:
    rows = []
    for strategy, ranks in (("ddp", 1), ("zero3", 2)):
        for name in OPTIMIZERS:
            if name == "Adafactor" and ranks > 1:
                continue  # refused
            for early in (False, True):
                rows.append(row(strategy, ranks, name, early))
    head = ["on one rank", "parameters", "gradients at peak", "optimizer state", "sum", "state per parameter"]
    facts = told(circumstances(["torch", "torchao"]))
    text = f"{table(head, rows)}\n\nMiB on rank 0. {facts}"
    fill(PAGE, text)
    print(text)


def row(strategy: str, ranks: int, name: str, early: bool) -> list[str]:
    """A line of the table."""
    found: Bytes = world.run(ranks, measured, strategy, name, early, timeout_s=300.0)[0]
    label = f"{strategy} of {ranks}, {name}{', in backward' if early else ''}"
    held = found.parameters, found.gradients, found.state
    each = found.state * ranks / found.numbers
    return [label, *(f"{size / MIB:.1f}" for size in (*held, sum(held))), f"{each:.2f} bytes"]


def measured(strategy: str, name: str, early: bool) -> Bytes:
    """Two steps on a GPT. What is held is counted whenever the optimizer steps."""
    run = begin(strategy, step_in_backward=early, announce=lambda _: None)
    options = {"layers": 4, "width": 512, "heads": 8}
    model = build("gpt", TOKENS, (LENGTH,), options)
    numbers, peaks = sum(parameter.numel() for parameter in model.parameters()), [0]

    class Counting(OPTIMIZERS[name]):  # type: ignore[misc]
        """Counts all gradients at each of its steps, be it of one parameter."""

        def step(self, closure: Any = None) -> Any:
            peaks.append(sum(size(p.grad) for p in model.parameters() if p.grad is not None))
            return super().step(closure)

    tokens = torch.randint(0, TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=4)
    model, optimizer, loader = run.prepare(model, Counting(model.parameters(), lr=1e-3), loader)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(loss, model, x, y)
        optimizer.step()
    state = [value for held in optimizer.state.values() for value in held.values()]
    parameters = sum(size(parameter) for parameter in model.parameters())
    return Bytes(parameters, max(peaks), sum(size(v) for v in state if isinstance(v, Tensor)), numbers)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def size(tensor: Tensor) -> int:
    """Bytes of this rank's part; of 8-bit state, of all that it consists of."""
    held: Any = local(tensor)
    if hasattr(held, "codes"):
        return sum(size(part) for part in (held.codes, held.scale, held.qmap))
    return int(held.numel() * held.itemsize)


if __name__ == "__main__":
    main()
