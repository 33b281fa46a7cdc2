"""Step time of zero2 and zero3 against `fully_shard` by hand, in the same processes, in turns.
`make bench-zero`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from benchmarks.interleaved import in_turns
from benchmarks.report_page import circumstances, write_result
from shoal.models import build
from shoal.run.supervised import supervised

RESULT = Path(__file__).with_name("result.json")
TIME, VOCABULARY, RANK_BATCH, STEPS = 64, 256, 4, 6


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return build("gpt", VOCABULARY, (TIME,), {"width": 256, "layers": 6, "heads": 8})


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def data() -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (STEPS * RANK_BATCH * dist.get_world_size(), TIME))
    return TensorDataset(tokens, tokens)


def by_hand(reshard: bool, mesh: DeviceMesh | None = None) -> Callable[[], None]:
    """PyTorch's tutorial: each block, then the model; one epoch when it is called. Args: mesh:
    None for the world's.
    """
    model = gpt()
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = data()
    loader = DataLoader(dataset, RANK_BATCH, sampler=DistributedSampler(dataset), drop_last=True)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    return epoch


def by_shoal(strategy: str) -> Callable[[], None]:
    run, model = shoal.init(strategy, announce=lambda _: None), gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data(), RANK_BATCH * dist.get_world_size(), shuffle=True, drop_last=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(loss_of, model), x, y)
            optimizer.step()

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = circumstances(("torch", "shoal"))
    candidates = {
        "by hand, zero2": by_hand(reshard=False),
        "Shoal, zero2": by_shoal("zero2"),
        "by hand, zero3": by_hand(reshard=True),
        "Shoal, zero3": by_shoal("zero3"),
    }
    times_s = in_turns(candidates, STEPS, options.rounds)
    if dist.get_rank() == 0:
        write_result(RESULT, {"circumstances": facts, "step_s": times_s})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
