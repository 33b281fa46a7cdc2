"""Random streams that depend only on their key, (seed, epoch, index), never on the rank or process
that draws; and the generators of Python and NumPy: their state, and how many numbers were drawn.

A number of Python's or NumPy's, such as the choice to leave out a layer, counts for the whole
batch, as on one device. So each micro-batch of a step begins in the state in which the step began.
Both are Mersenne twisters: a block of 624 words and the position of the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_MASK = (1 << 64) - 1
_WORDS = 624
_MOST_BLOCKS = 1000
"""Blocks that are searched: nobody draws more numbers for one block of a model."""


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed, a function of `parts` alone. Similar parts give unrelated seeds.

    Source: the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), applied once for each
    part."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 30) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int) -> None:
    """Seed the CPU generators of torch, Python and NumPy. Samples are made on the CPU, so CUDA is
    not seeded.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class GeneratorStates:
    """The state of the generators of torch, Python and NumPy at one moment.

    Args:
        devices: those of them that are CUDA devices have a generator each.
        beyond_torch: False to leave out those of Python and NumPy, which takes a tenth as long.
    """

    def __init__(self, devices: Iterable[torch.device] = (), beyond_torch: bool = True) -> None:
        self._torch = torch.get_rng_state()
        self._devices = [
            (device, torch.cuda.get_rng_state(device))
            for device in set(devices)
            if device.type == "cuda"
        ]
        self._host = HostGenerators.now() if beyond_torch else None

    def restore(self) -> None:
        """Put the generators back into this state."""
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.cuda.set_rng_state(state, device)
        if self._host is not None:
            self._host.restore()


@contextmanager
def preserve_rng_state(
    devices: Iterable[torch.device] = (), beyond_torch: bool = True
) -> Iterator[None]:
    """Restore the state of the generators after the block. The arguments are as above."""
    saved = GeneratorStates(devices, beyond_torch)
    try:
        yield
    finally:
        saved.restore()


class MicrobatchSeeds:
    """The seeds of a step's micro-batches, so that every pass draws the same random numbers.

    They are drawn from torch's generator when this object is made. Numbers of Python and NumPy
    count for the whole batch: each micro-batch begins in the state of that moment.

    Args:
        devices: whose generators the passes use, beside the CPU.
        agreed: returns the seed of the first of the ranks that must draw alike.

    Attributes: host: the state of Python's and NumPy's in which each micro-batch begins.
    """

    def __init__(
        self, devices: set[torch.device], agreed: Callable[[int], int] = lambda seed: seed
    ) -> None:
        self._devices = devices
        self._torch = agreed(int(torch.randint(2**62, ())))
        self.host = HostGenerators.now()

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Draw torch's numbers of one micro-batch in this context."""
        with preserve_rng_state(self._devices, beyond_torch=False):
            torch.manual_seed(derive_seed(self._torch, microbatch))
            yield


def seeded(make: Callable[[], Iterator[T]], seed: int, ahead: int) -> Iterator[T]:
    """Yield the items of an iterator whose draws come from generators seeded by `seed` alone.

    The caller's generators are as before whenever it has control.

    Args:
        make: begins the iterator, under the seed.
        ahead: items that are drawn at once.
    """
    iterator, states = None, None
    while True:
        with preserve_rng_state():
            if iterator is None or states is None:
                seed_all(seed)
                iterator = make()
            else:
                states.restore()
            items = list(islice(iterator, ahead))
            states = GeneratorStates()
        yield from items
        if len(items) < ahead:
            return


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators as tensors, for a checkpoint."""
    host = HostGenerators.now()
    version, python, gauss = host.python
    assert version == 3
    # Tensors can hold only numbers, so the states are taken apart.
    _, key, position, has_gauss, numpy_gauss = host.numpy
    words = [*np.frombuffer(key, dtype=np.uint32).tolist(), position, has_gauss]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor(words, dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_gauss], dtype=torch.float64),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def load_random_state(state: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Restore the generators from the result of `random_state`.

    Args: device: of this rank, which may be of another kind than the one that saved.

    Returns: a sentence if the random numbers on the device begin anew.
    """
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    python = (3, tuple(state["python"].tolist()), gauss[0] if gauss else None)
    *keys, position, has_gauss = state["numpy"].tolist()
    key = np.array(keys, dtype=np.uint32).tobytes()
    numpy = ("MT19937", key, position, has_gauss, state["numpy_gauss"].item())
    HostGenerators(python, numpy).restore()
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if (device.type == "cuda") == ("cuda" in state):
        return []
    before, now = ("a GPU", "the CPU") if "cuda" in state else ("the CPU", "a GPU")
    return [
        f"the checkpoint was saved on {before} and goes on on {now}: random numbers on "
        "the device, such as dropout masks, are others than those of an uninterrupted run"
    ]


class HostGenerators(NamedTuple):
    """The state of the generators of Python and NumPy at one moment. Equal states are `==`.

    Attributes:
        python: as of `random.getstate`.
        numpy: as of `numpy.random.get_state`, with the key as bytes.
    """

    python: tuple[Any, ...]
    numpy: tuple[str, bytes, int, int, float]

    @classmethod
    def now(cls) -> HostGenerators:
        """Return the state of this moment."""
        numpy: Any = np.random.get_state()
        kind, key, position, has_gauss, gauss = numpy
        # A value that was used up stays where it lay.
        gauss = gauss if has_gauss else 0.0
        return cls(random.getstate(), (kind, key.tobytes(), position, has_gauss, gauss))

    def restore(self) -> None:
        """Put both generators back into this state."""
        random.setstate(self.python)
        kind, key, position, has_gauss, gauss = self.numpy
        words = np.frombuffer(key, dtype=np.uint32)
        np.random.set_state((kind, words, position, has_gauss, gauss))

    def drawn_until(self, later: HostGenerators) -> tuple[int, int]:
        """Return how many words were drawn from Python's and from NumPy's until a later state."""
        numpy_words = (
            (np.frombuffer(key, dtype=np.uint32), position)
            for _, key, position, *_ in (self.numpy, later.numpy)
        )
        return python_words(self.python, later.python), _drawn_words(*numpy_words)


def python_words(before: tuple[Any, ...], later: tuple[Any, ...]) -> int:
    """Return how many words a `random.Random` has drawn between two of its states."""
    return _drawn_words(*((words, position) for _, (*words, position), _ in (before, later)))


def _drawn_words(before: tuple[Any, int], later: tuple[Any, int]) -> int:
    """Return how many words a twister has drawn between two blocks, each with its position.

    0 if no number of words leads there: somebody has set the seed.
    """
    twister: Any = np.random.RandomState()
    twister.set_state(("MT19937", *before))
    words = (later[1] - before[1]) % _WORDS
    if words:  # 0 bytes take a word
        twister.bytes(4 * words)
    for drawn in range(words, words + _MOST_BLOCKS * _WORDS, _WORDS):
        if np.array_equal(twister.get_state()[1], later[0]):
            return drawn
        twister.bytes(4 * _WORDS)
    return 0
