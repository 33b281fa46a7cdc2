"""Bytes on each rank in every case, counted tensor by tensor, beside the formula. Run it by `make
bench-memory`.

A GPT takes four steps in float32 on Gloo; counted in the last, for the rank that holds most:

    states   parameters, gradients and optimizer states; gradients after the backward pass or,
             where it frees them, the most that there were at once
    beside   the most at once of all else: activations, gathered units, what operations need
    peak     the most at once of everything; of what is offloaded, on the device
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.memory.accounting import Peak, held_bytes
from benchmarks.memory.cases import BATCH, CASES, OPTIMIZERS, RANKS, TIME, VOCABULARY, Case, gpt
from benchmarks.memory.formula import expected
from benchmarks.report_page import circumstances, write_result
from shoal.errors import StrategyRefused
from shoal.run.supervised import supervised
from shoal.strategies.wrap_units import units
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")


def counted(case: Case) -> dict[str, int] | str:
    """Four steps on this rank: bytes of each kind, or why the case is refused. Collective."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = shoal.init(case.strategy, announce=lambda _: None)
    model = gpt()
    tokens = torch.randint(0, VOCABULARY, (4 * BATCH, TIME))
    loader = DataLoader(TensorDataset(tokens, tokens), batch_size=BATCH)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    try:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    except StrategyRefused as refused:
        return str(refused)
    *before, last = loader
    for batch in (
        before
    ):  # ddp looks on in the first, makes its buckets in the second, and others in the third
        optimizer.zero_grad()
        run.forward_backward(supervised(_loss, model), *batch)
        optimizer.step()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for p in parameters for value in optimizer.state[p].values()]
    with Peak(parameters, state, run.device) as peak:
        optimizer.zero_grad()
        run.forward_backward(supervised(_loss, model), *last)
        gradients = held_bytes(p.grad for p in parameters if p.grad is not None)
        if not case.offloaded:  # that step computes in host memory
            optimizer.step()
    return {
        "parameters": held_bytes(parameters),
        "gradients": gradients,
        "optimizer": held_bytes(state),
        "beside": peak.beside_bytes,
        "peak": peak.beside_bytes if case.offloaded else peak.peak_bytes,
    }


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    model = gpt()
    sizes = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units(model).items()}
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "torchao", "shoal")),
        "parameters": sum(p.numel() for p in model.parameters()),
        "largest_unit": max(sizes.values()),
        "outside_units": sum(p.numel() for p in model.parameters()) - sum(sizes.values()),
        "cases": [],
    }
    for case in CASES:
        entry: dict[str, Any] = {
            **case._asdict(),
            "label": case.label,
            "offloaded": case.offloaded,
            "ranks": {},
        }
        for ranks in RANKS:
            entry["ranks"][str(ranks)] = _entry(case, ranks)
            print(case.label, ranks, entry["ranks"][str(ranks)], flush=True)
        result["cases"].append(entry)
    write_result(RESULT, result)


def _entry(case: Case, ranks: int) -> dict[str, Any]:
    found = world.run(ranks, counted, case, timeout_s=300)
    refused = [message for message in found if isinstance(message, str)]
    if refused:
        return {"refused": refused[0]}
    held = [bytes_of for bytes_of in found if not isinstance(bytes_of, str)]
    most = max(held, key=lambda rank: rank["peak"])
    return {"found": most, "expected": expected(case, ranks)}


if __name__ == "__main__":
    main()
