"""Attributes that are DTensors are put back without a collective: other stages have other ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shoal.strategies.module_snapshot import ModelSnapshot
from shoal.testing import world


def restored_on_rank_0() -> tuple[list[float], float]:
    """Let rank 0 alone put a sharded attribute back. Returns it, and a sum over the ranks."""
    mesh, held = init_device_mesh("cpu", (dist.get_world_size(),)), torch.zeros(2)
    model = nn.Linear(2, 2)
    if dist.get_rank() == 0:
        model.cached = DTensor.from_local(held, mesh, [Shard(0)], run_check=False)
    snapshot = ModelSnapshot(model)
    held += 1
    snapshot.restore()
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return held.tolist(), total.item()


def test_a_sharded_attribute_of_one_rank_is_put_back_by_it_alone() -> None:
    assert world.run(2, restored_on_rank_0) == [([0.0, 0.0], 3.0), ([1.0, 1.0], 3.0)]
