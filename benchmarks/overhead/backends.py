"""The steps of three strategies over each backend, beside the hand-written step over Gloo, in
turns. Writes backends.json. Run it by `make bench-overhead`.

      world over Gloo     by hand over Gloo │ Shoal over Gloo
      world over shoal    by hand over Gloo │ Shoal over shoal │ by hand over shoal │ no exchange

Ratios are formed within a round. A process has one world, so these are two runs; each has the
hand-written step over Gloo among its candidates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.collectives import steps
from benchmarks.interleaved import in_turns
from benchmarks.overhead import tensor_loops
from benchmarks.report_page import circumstances, write_result
from benchmarks.zero import measure as zero
from shoal.run.supervised import supervised

RESULT = Path(__file__).with_name("backends.json")
BACKENDS = {"Gloo": "gloo", "shoal": "cpu:shoal"}
Epoch = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="names of tasks; all unless given")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS[options.backend])
    facts, gloo = circumstances(("torch", "shoal")), dist.new_group(backend="gloo")
    made = [gloo] if options.backend == "Gloo" else [gloo, dist.group.WORLD]
    found = {}
    for task, (count, shoals, by_hand) in tasks().items():
        if options.only and task not in options.only:
            continue
        hands = {
            f"by hand over {name}": by_hand(group)
            for name, group in zip(BACKENDS, made, strict=False)
        }
        if options.backend == "shoal" and task.startswith("ddp"):
            hands["no exchange"] = by_hand(None)  # what no backend can save
        epochs: Mapping[str, Any] = {f"Shoal over {options.backend}": shoals(), **hands}
        found[task] = in_turns(epochs, count, options.rounds)
    if dist.get_rank() == 0:
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        before[options.backend] = {"circumstances": facts, "step_s": found}
        write_result(options.out, before)
    dist.destroy_process_group()


def tasks() -> dict[str, tuple[int, Callable[[], Epoch], Callable[[Any], Epoch]]]:
    """How many steps an epoch has, how Shoal takes one, and how a hand-written loop does over a
    group.
    """
    found: dict[str, tuple[int, Callable[[], Epoch], Callable[[Any], Epoch]]] = {}
    for name, (make, count) in steps.networks().items():
        found[f"ddp, {name}"] = (
            count,
            partial(_ddp, make, count),
            partial(_ddp_by_hand, make, count),
        )
    found["zero3, GPT of 5 million"] = (
        zero.STEPS,
        partial(zero.by_shoal, "zero3"),
        lambda group: zero.by_hand(reshard=True, mesh=_line(group)),
    )
    found["tensor=2, GPT of 5 million"] = (
        tensor_loops.STEPS,
        tensor_loops.by_shoal,
        lambda group: tensor_loops.by_hand(_line(group)),
    )
    return found


def _ddp(make: Callable[[], nn.Module], count: int) -> Epoch:
    torch.manual_seed(0)
    run, model = shoal.init("ddp", announce=lambda _: None), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = steps.samples(seed=0)
    ranks, rows = dist.get_world_size(), len(y)
    batches = DataLoader(
        TensorDataset(x.repeat(ranks * count, 1, 1, 1), y.repeat(ranks * count)), ranks * rows
    )
    model, optimizer, loader = run.prepare(model, optimizer, batches)
    fetched = list(loader)

    def epoch() -> None:
        for x, y in fetched:
            optimizer.zero_grad()
            run.forward_backward(supervised(F.cross_entropy, model), x, y)
            optimizer.step()

    return epoch


def _ddp_by_hand(make: Callable[[], nn.Module], count: int, group: Any) -> Epoch:
    return partial(steps.by_hand(make, group), count)


def _line(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


if __name__ == "__main__":
    main()
