"""Bytes on each rank under every strategy, counted tensor by tensor, beside the formula. Run it by `make bench-memory`.

A GPT takes two AdamW steps in float32 on Gloo; counted in the second, for the rank that holds most:

    states   parameters, gradients at the end of the backward pass, optimizer states
    peak     the most that was held at once in the step, less the states at its end: activations, gathered units
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.memory.accounting import Peak, held_bytes
from benchmarks.page import circumstances
from shoal.models import build
from shoal.strategies.units import units
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "recompute,ddp", "recompute,zero3", "recompute=2,zero3")
RANKS = (1, 2, 4, 8)
TIME, VOCABULARY, BATCH = 64, 256, 16


def gpt() -> nn.Module:
    return build("gpt", VOCABULARY, (TIME,), {"width": 256, "layers": 8, "heads": 8})


def counted(strategy: str) -> dict[str, int]:
    """Two steps on this rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = shoal.init(strategy, announce=lambda _: None)
    model = gpt()
    tokens = torch.randint(0, VOCABULARY, (2 * BATCH, TIME))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(tokens, tokens), batch_size=BATCH)
    )
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if step == 0:
            run.forward_backward(_loss, model, x, y)
            optimizer.step()
            continue
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [value for p in parameters for value in optimizer.state[p].values()]
        with Peak([*parameters, *state, *model.buffers()]) as peak:
            run.forward_backward(_loss, model, x, y)
        states = {
            "parameters": held_bytes(parameters),
            "gradients": held_bytes(p.grad for p in parameters),
            "optimizer": held_bytes(state),
        }
    return states | {"peak_above_states": peak.peak_bytes - sum(states.values())}


def expected(strategy: str, ranks: int) -> dict[str, int]:
    """The formula, in bytes: 4 + 4 + 8 for each parameter; shards are cut along dimension 0 and rounded up."""
    model = gpt()
    sharded = "zero" in strategy and ranks > 1
    numel = sum(_shard(p, ranks) if sharded else p.numel() for p in model.parameters())
    return {"parameters": 4 * numel, "gradients": 4 * numel, "optimizer": 8 * numel}


def _shard(parameter: nn.Parameter, ranks: int) -> int:
    return -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    model = gpt()
    sizes = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units(model).items()}
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "shoal")),
        "parameters": sum(p.numel() for p in model.parameters()),
        "largest_unit": max(sizes.values()),
        "outside_units": sum(p.numel() for p in model.parameters()) - sum(sizes.values()),
        "counted": {},
    }
    for strategy in STRATEGIES:
        for ranks in RANKS:
            found = world.run(ranks, counted, strategy, timeout_s=300)
            most = max(found, key=lambda rank: sum(rank.values()))
            result["counted"].setdefault(strategy, {})[str(ranks)] = {
                "found": most,
                "expected": expected(strategy, ranks),
            }
            print(strategy, ranks, most, flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
