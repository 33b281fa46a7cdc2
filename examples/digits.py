"""Handwritten digits with a script of your own. The lines marked `# shoal` are new.

python examples/digits.py                          one process
shoal launch -n 4 examples/digits.py               four; the same losses
torchrun --nproc-per-node 4 examples/digits.py     so does this
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal  # shoal
from shoal.config.job import DataConfig
from shoal.data import load

run = shoal.init()  # shoal
digits = load(DataConfig(name="digits"), seed=0)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(
    run.device
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(digits.train, batch_size=64, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # shoal


def compute_loss(x, y):  # shoal
    return F.cross_entropy(model(x), y)


for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.forward_backward(compute_loss, x, y)  # shoal
        optimizer.step()
    print(f"epoch {epoch + 1}  loss {loss.item():.6f}")


def count_correct(x, y):
    return {"correct": (model(x).argmax(dim=1) == y).sum()}


found = run.evaluate(count_correct, DataLoader(digits.validation, batch_size=200))
print(f"accuracy {100 * found['correct'] / found['samples']:.2f} % of {found['samples']:.0f}")
run.save("digits.pt")  # shoal
