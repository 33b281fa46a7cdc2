"""The generators of Python and NumPy: their state, and how many numbers were drawn between two.

A number of theirs, such as the choice to leave out a layer, counts for the whole batch, as on one
device. So each micro-batch of a step begins in the state in which the step began.

Both are Mersenne twisters: a block of 624 words and the position of the next one.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np

_WORDS = 624
_MOST_BLOCKS = 1000
"""Blocks that are searched: nobody draws more numbers for one block of a model."""
_KEY_AND_POSITION = _WORDS + 1


class DrawnWords(NamedTuple):
    """The 32-bit words that were drawn from each generator."""

    python: int
    numpy: int


class HostGenerators(NamedTuple):
    """The state of the generators of Python and NumPy at one moment. Equal states are `==`.

    Attributes:
        python: as of `random.getstate`.
        key, position, has_gauss, gauss: as of `numpy.random.get_state`; the key as bytes.
    """

    python: tuple[Any, ...]
    key: bytes
    position: int
    has_gauss: int
    gauss: float

    @classmethod
    def now(cls) -> HostGenerators:
        """Return the state of this moment."""
        numpy: Any = np.random.get_state(legacy=False)
        words = numpy["state"]
        # A value that was used up stays where it lay.
        gauss = numpy["gauss"] if numpy["has_gauss"] else 0.0
        return cls(
            random.getstate(), words["key"].tobytes(), words["pos"], numpy["has_gauss"], gauss
        )

    def restore(self) -> None:
        """Put both generators back into this state."""
        random.setstate(self.python)
        key = np.frombuffer(self.key, dtype=np.uint32)
        np.random.set_state(("MT19937", key, self.position, self.has_gauss, self.gauss))

    def has_moved(self) -> bool:
        """Return whether a number was drawn since. Takes a few microseconds."""
        # A value left over by a normal distribution is taken without drawing a word.
        if self.has_gauss or random.getstate() != self.python:
            return True
        return _words_of_numpy() != (self.key[:4], self.position)

    def drawn_until(self, later: HostGenerators) -> DrawnWords | None:
        """Return how many words were drawn between this state and a later one.

        None if no number of words leads there: somebody has set the seed.
        """
        python = random.Random()
        python.setstate(self.python)
        drawn_python = _distance(
            self.python[1][-1],
            later.python[1][-1],
            lambda words: python.getrandbits(32 * words),
            lambda: python.getstate()[1] == later.python[1],
        )
        numpy = np.random.RandomState()
        key = np.frombuffer(self.key, dtype=np.uint32)
        numpy.set_state(("MT19937", key, self.position, 0, 0.0))
        drawn_numpy = _distance(
            self.position,
            later.position,
            lambda words: numpy.bytes(4 * words),
            lambda: _key_of(numpy) == later.key,
        )
        if drawn_python is None or drawn_numpy is None:
            return None
        return DrawnWords(drawn_python, drawn_numpy)


def _distance(start: int, end: int, draw: Any, has_arrived: Any) -> int | None:
    words = (end - start) % _WORDS
    if words:
        draw(words)
    for _ in range(_MOST_BLOCKS):
        if has_arrived():
            return words
        draw(_WORDS)
        words += _WORDS
    return None


def _key_of(generator: np.random.RandomState) -> bytes:
    state: Any = generator.get_state(legacy=False)
    key: bytes = state["state"]["key"].tobytes()
    return key


def _words_of_numpy() -> tuple[bytes, int]:
    """Return the first word of NumPy's block, and the position. The state as a whole takes a
    hundred times as long.
    """
    generators: Any = np.random  # whose stubs lack this public function
    generator = generators.get_bit_generator()
    address = generator.ctypes.state_address
    words = (ctypes.c_uint32 * _KEY_AND_POSITION).from_address(address)
    return int(words[0]).to_bytes(4, "little"), int(words[_WORDS])
