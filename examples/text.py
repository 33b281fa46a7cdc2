"""A small GPT on the source text of Python's standard library, with a script of your own.

    python examples/text.py                            one process
    shoal launch -n 2 examples/text.py                 two; the same losses

Sentences of different length in one batch would weigh their tokens wrongly if each rank took its
own mean: the function below returns a sum and a count, and the gradients are divided by the count
of all ranks."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

import shoal
from shoal.config.job import DataConfig
from shoal.data import load
from shoal.models import build

torch.set_default_dtype(
    torch.float64
)  # so that the losses of one process and of many agree in every digit shown
run = shoal.init()
text = load(DataConfig(name="stdlib", sequence_length=64), seed=0)

model = build("gpt", text.num_classes, text.input_shape, {"width": 64, "layers": 2, "heads": 4}).to(
    run.device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Subset(text.train, range(1200)), batch_size=40, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)


def compute_loss(x, target):
    """Cross-entropy of everything but spaces, which are half of the text and teach little."""
    logits = model(x)
    weights = (target != ord(" ")).to(logits.dtype)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return shoal.counted((losses * weights.flatten()).sum(), weights.sum())


for step, (x, y) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = run.forward_backward(compute_loss, x, y)
    run.clip_gradients(1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}  loss {loss.item():.6f}")
run.save("text.pt")
