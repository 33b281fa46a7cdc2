"""A loop on Shoal with dropout, momentum and uneven shares: 7 samples a batch.

With the word "attention" its blocks have query, key and value in one matrix, as minGPT's.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

run = shoal.init()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 2
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            each.unflatten(2, (self.n_head, 4)).transpose(1, 2)
            for each in self.qkv(x).chunk(3, dim=2)
        ]
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, None, rate, True)
        return self.proj(y.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        kind = AttentionBlock if "attention" in sys.argv else Block
        self.blocks = nn.ModuleList([kind(), kind()])
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tokens = torch.randint(0, 10, (30, 5))
loader = DataLoader(TensorDataset(tokens), batch_size=7, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
checkpoint = run.checkpoint("checkpoints")
step = checkpoint.resume()
run.log_to("jsonl", directory="log", step=step)


def compute_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


for (x,) in loader:
    optimizer.zero_grad()
    loss = run.forward_backward(compute_loss, x)
    optimizer.step()
    step += 1
    run.log({"loss": loss}, step=step)
    checkpoint.save(step)
run.save("shoal_loop.pt")
