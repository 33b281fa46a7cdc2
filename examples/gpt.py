"""A small GPT on the source text of Python's standard library: one script, divided in any way, with
the same losses.

    python examples/gpt.py                                               one process
    shoal launch -n 2 --strategy ddp examples/gpt.py                     batch over ranks
    shoal launch -n 2 --strategy zero3 examples/gpt.py                   and parameters, too
    shoal launch -n 2 --strategy tensor=2 examples/gpt.py                each layer over ranks
    shoal launch -n 2 --strategy pipeline=2 examples/gpt.py              layers in stages
    shoal launch -n 8 --strategy tensor=2,pipeline=2,zero1 examples/gpt.py   all at once

The first lines of each run show how the model is divided. In float64 the losses agree in every
printed digit."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

import shoal
from shoal.config.job import DataConfig
from shoal.data import load
from shoal.models import build

torch.set_default_dtype(torch.float64)
run = shoal.init()
text = load(DataConfig(name="stdlib", sequence_length=32), seed=0)

model = build("gpt", text.num_classes, text.input_shape, {"width": 32, "layers": 4, "heads": 4}).to(
    run.device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Subset(text.train, range(320)), batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)


def compute_loss(x, target):
    """Mean over all positions."""
    return F.cross_entropy(model(x).flatten(0, 1), target.flatten())


for step, (x, y) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = run.forward_backward(compute_loss, x, y)
    run.clip_gradients(1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}  loss {loss.item():.8f}")
run.save("gpt.pt")
