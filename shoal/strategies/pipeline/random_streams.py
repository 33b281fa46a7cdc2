"""Random numbers of a pipeline: what is drawn does not depend on the number of stages.

      code around units     one stream, the same on all ranks of a pipeline
      unit                  a stream of its own, whose seed is the next number of the stream around

Every rank draws the seed of every unit, also of those that other stages compute. So code around
units draws the same noise on all ranks, and a unit draws the same dropout masks in any stage. A
checkpoint around a unit restores the stream around it, and so the seed, when it calls the unit
again.

The generators of Python and NumPy have one stream, which a unit of another stage would not move. So
a function that draws from them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.data.seeds import HostGenerators, preserve_rng_state
from shoal.platform.torch_private.subclasses import disable_dispatch_modes
from shoal.strategies.pipeline.absent import WalkRefusal

_LARGEST_SEED = 2**31 - 1
_DRAWING = ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "poisson", "rrelu")
_DRAWING_ALSO = ("exponential_", "cauchy_", "geometric_", "scaled_dot_product_attention")


def may_draw(label: str) -> bool:
    """Return whether a torch function of this name may draw random numbers."""
    return label in _DRAWING_ALSO or any(word in label for word in _DRAWING)


@contextmanager
def host_draws_refused() -> Iterator[None]:
    """Check that nothing is drawn from the generators of Python and NumPy in this context.

    Raises: WalkRefusal: a number was drawn, which other stages and micro-batches do not know.
    """
    before = HostGenerators.now()
    yield
    if before.has_moved():
        raise WalkRefusal(
            "pipeline: compute_loss, or a block that it calls, draws numbers of Python's `random` "
            "or of NumPy, which other stages and micro-batches would not know of. Draw with torch, "
            "or in the loop, and hand the number to compute_loss."
        )


def draw_seed() -> int:
    """Return a seed: the next number of torch's generator on the CPU."""
    with disable_dispatch_modes():  # the step's note of random numbers is about the user's
        return int(torch.randint(_LARGEST_SEED, (), device="cpu"))


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for the block, and restore them after it; None leaves them alone."""
    if seed is None:
        yield
        return
    with preserve_rng_state([device], beyond_torch=False):
        # torch.manual_seed asks for every kind of device, which takes as long as a small layer.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
