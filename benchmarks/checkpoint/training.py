"""The training whose state is saved: a GPT of 25 million parameters, and its AdamW moments."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.models import build
from shoal.run.supervised import supervised

ROUNDS, RANKS, STEPS = 9, 2, 3  # the first round is not counted
TIME, VOCABULARY, ROWS = 32, 256, 4


def training(strategy: str) -> tuple[shoal.Run, Callable[[], None]]:
    """Prepare the run, take one step, and return what takes STEPS more of them. Collective."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = shoal.init(strategy, announce=lambda _: None)
    model = build("gpt", VOCABULARY, (TIME,), {"width": 512, "layers": 8, "heads": 8})
    tokens = torch.randint(0, VOCABULARY, (ROWS * RANKS * 1000, TIME))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(tokens, tokens), batch_size=ROWS)
    )
    batches = iter(loader)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        run.forward_backward(supervised(_loss, model), x, y)
        optimizer.step()

    def steps() -> None:
        for _ in range(STEPS):
            step()

    step()
    return run, steps


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
