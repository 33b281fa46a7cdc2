"""Random numbers that a script draws in a step: did a generator move between two moments?

    batch fetched ── noise of the loop ── layer ends ── noise of the model ── next layer ends
                └── drawn for this layer ──┘└────── drawn for this one ──────────────┘

Ranks draw other numbers than one device, so what is computed from them differs by design.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class DrawWatch:
    """Tells if the generators of torch, NumPy and Python have moved since it was asked last.

    Attributes: is_paused: Shoal draws, and the numbers of one device.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._has_batch = False
        self._state = _state()

    def fetched(self) -> None:
        """Leave out what was drawn until a batch was there: by samplers, and by data sets."""
        self._has_batch, self._state = True, _state()

    def called(self) -> None:
        """Leave out what was drawn before the first model of a step that fetched no batch."""
        if not self._has_batch:
            self.fetched()

    def stepped(self) -> None:
        """Begin the next step."""
        self._has_batch = False

    def drew(self) -> bool:
        """Return True if numbers were drawn since the last call of a method."""
        before, self._state = self._state, _state()
        return self._state != before and not self.is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is drawn until the end."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused, self._state = False, _state()


def _state() -> tuple[bytes, object, bytes, int]:
    _, words, position, *_ = np.random.get_state()
    numpy_words = np.asarray(words).tobytes()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_words, int(position)
