"""A script for several hosts: one step of ddp against the same step on the full batch."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(5, 3, dtype=torch.float64)
inputs = torch.randn(4 * world, 5, dtype=torch.float64)
alone = nn.Linear(5, 3, dtype=torch.float64)
alone.load_state_dict(model.state_dict())
for module, rows in (
    (DistributedDataParallel(model), inputs[4 * rank : 4 * rank + 4]),
    (alone, inputs),
):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(rows).pow(2).mean().backward()
        optimizer.step()
assert torch.allclose(model.weight, alone.weight, rtol=1e-10, atol=0)
names = ("SHOAL_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CARRIED", "PWD")
words = [f"{name}={os.environ.get(name)}" for name in names]
print(f"{rank} of {world}", *words, os.getcwd(), sys.argv[1:], flush=True)
print(f"warning of {rank}", file=sys.stderr, flush=True)
if "--fail" in sys.argv and rank == world - 1:
    print("the disk is on fire", file=sys.stderr, flush=True)
    os._exit(7)
dist.destroy_process_group()
