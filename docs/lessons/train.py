"""Four residual blocks learn whether two numbers have the same sign. Used by all lessons."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


run = shoal.init()
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), *[Block(32) for _ in range(4)], nn.Linear(32, 2))
model = model.to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)


def compute_loss(x, y):
    return F.cross_entropy(model(x), y)


for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.forward_backward(compute_loss, x, y)
        optimizer.step()
    run.print(f"epoch {epoch + 1}  loss {loss.item():.6f}")
run.save("model.safetensors")
