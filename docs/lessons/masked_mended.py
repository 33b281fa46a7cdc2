"""The script masked.py without its mistake: divided by the number of tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
tokens = torch.randint(1, 50, (64, 12))
lengths = torch.randint(2, 13, (64, 1))
tokens[torch.arange(12) >= lengths] = 0  # padding
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 50))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(tokens)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=DistributedSampler(data))

for (batch,) in loader:
    optimizer.zero_grad()
    scores = model(batch[:, :-1])
    losses = F.cross_entropy(scores.transpose(1, 2), batch[:, 1:], reduction="none")
    mask = batch[:, 1:] != 0
    count = mask.sum()
    dist.all_reduce(count)
    loss = (losses * mask).sum() / count * dist.get_world_size()  # DDP takes the mean over ranks
    loss.backward()
    optimizer.step()
