"""A loop with DistributedDataParallel or fully_shard by hand; the argument plants an error."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KIND = sys.argv[1] if len(sys.argv) > 1 else "right"
distributed.init_process_group("gloo")
WORLD = distributed.get_world_size()
torch.manual_seed(distributed.get_rank() if KIND == "apart" else 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)))


net = Net()
model: nn.Module = net
if KIND == "sharded":
    fully_shard(net.body)
    fully_shard(net)
elif KIND == "partly sharded":  # and nothing reduces the gradients of the others
    fully_shard(net.body)
elif KIND != "apart":
    model = DistributedDataParallel(net)
draws = torch.Generator().manual_seed(1)
x = torch.randint(0, 10, (34, 5), generator=draws)
y = torch.randint(0, 10, (34, 5), generator=draws)
y[torch.rand(34, 5, generator=draws) < 0.4] = -100
data = TensorDataset(x, y)
sampler = None if KIND == "no sampler" else DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
rate = 0.1 * (WORLD if KIND == "rate" else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
if KIND == "idle":
    sys.exit()
for x, y in loader:
    optimizer.zero_grad()
    called = net if KIND == "past the wrapper" else model
    output = (called(x=x) if KIND == "no sampler" else called(x)).flatten(0, 1)
    target = y.flatten()
    if KIND == "mean of means":
        loss = F.cross_entropy(output, target, ignore_index=-100)
    else:
        count = (target != -100).sum()
        distributed.all_reduce(count)
        loss = F.cross_entropy(output, target, ignore_index=-100, reduction="sum")
        loss = loss / count * (1 if KIND == "scale" else WORLD)
    loss.backward()
    if KIND == "one":
        assert net.head.bias.grad is not None
        net.head.bias.grad *= WORLD
    if KIND == "crash":
        raise ValueError("planted")
    optimizer.step()
