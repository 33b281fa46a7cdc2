"""Random numbers of a pipeline: what is drawn does not depend on the number of stages.

      code around units     one stream, the same on all ranks of a pipeline
      unit                  a stream of its own, whose seed is the next number of the stream around

Every rank draws the seed of every unit, also of those that other stages compute. So code around
units draws the same noise on all ranks, and a unit draws the same dropout masks in any stage. A
checkpoint around a unit restores the stream around it, and so the seed, when it calls the unit
again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shoal.data.seeds import preserve_rng_state
from shoal.platform.torch_private.subclasses import disable_dispatch_modes

_LARGEST_SEED = 2**31 - 1


def draw_seed() -> int:
    """Return a seed: the next number of torch's generator on the CPU."""
    with disable_dispatch_modes():  # the step's note of random numbers is about the user's
        return int(torch.randint(_LARGEST_SEED, (), device="cpu"))


@contextmanager
def seeded(seed: int, device: torch.device, beyond_torch: bool = True) -> Iterator[None]:
    """Seed the generators for the block, and restore them after it.

    Args: beyond_torch: False to leave out those of Python and NumPy, which takes a tenth as long.
    """
    with preserve_rng_state([device], beyond_torch):
        # torch.manual_seed asks for every kind of device, which takes as long as a small layer.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        if beyond_torch:
            random.seed(seed)
            np.random.seed(seed)
        yield
