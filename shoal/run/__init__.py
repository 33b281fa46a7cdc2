"""The library's face: `init`, `prepare`, `forward_backward`, `save`.

run = shoal.init()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = run.forward_backward(F.cross_entropy, model, x, y)
    optimizer.step()
run.save("model.pt")
"""

from shoal.run.run import Run
from shoal.run.start import PrecisionName, begin, init

__all__ = ["PrecisionName", "Run", "begin", "init"]
