"""A script that does one all-reduce. `reduce.py FOLDER` notes in FOLDER/RANK the sum that it
found, and when.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

# mpirun has names of its own for what the others call RANK and WORLD_SIZE.
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
world = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)

found = torch.ones(1)
dist.all_reduce(found)
all_reduce_s = time.monotonic()  # one clock for all processes of a machine

Path(sys.argv[1], str(rank)).write_text(
    json.dumps({"world": int(found.item()), "all-reduce": all_reduce_s})
)
dist.destroy_process_group()
