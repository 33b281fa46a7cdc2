"""A script that trains, stopped after its first step. `step.py FOLDER` notes in FOLDER/RANK
what it found, and when.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# mpirun has names of its own for what the others call RANK and WORLD_SIZE.
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
world = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)

found = torch.ones(1)
dist.all_reduce(found)
all_reduce_s = time.monotonic()  # one clock for all processes of a machine

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
F.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
optimizer.step()
step_s = time.monotonic()

notes = {
    "world": int(found.item()),
    "all-reduce of that script": all_reduce_s,
    "optimizer step": step_s,
}
Path(sys.argv[1], str(rank)).write_text(json.dumps(notes))
dist.destroy_process_group()
