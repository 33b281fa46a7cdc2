"""The public API of a run: `init`, `prepare`, `forward_backward`, `save`.

run = shoal.init()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    optimizer.step()
run.save("model.pt")
"""

from shoal.run.init import PrecisionName, init, init_with_place
from shoal.run.run import Run

__all__ = ["PrecisionName", "Run", "init", "init_with_place"]
