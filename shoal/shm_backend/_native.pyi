from collections.abc import Sequence

VERSION: int

class NativeAllReduce:
    awaited_phase: int
    same_call: int
    def __init__(
        self,
        rank: int,
        words: Sequence[int],  # the address of the words of each rank
        slots: Sequence[int],  # the address of the first slot of each rank
        # indices of PHASE, SLEEPS and the first call; calls, slots, slot_bytes, max_phases_ahead
        layout: tuple[int, int, int, int, int, int, int],
        slicing: tuple[int, int],  # slice_bytes, one_pass_bytes
        spin_ns: int,
        yields: int,
    ) -> None: ...
    def advance(
        self, address: int, bytes: int, code: int, word: int, first: int, step: int, /
    ) -> int: ...
