from collections.abc import Sequence

VERSION: int

class Express:
    wanted: int
    of_this_call: int
    def __init__(
        self,
        rank: int,
        words: Sequence[int],
        numbers: Sequence[int],
        phase_at: int,
        sleeps_at: int,
        ring_at: int,
        ring: int,
        slots: int,
        slot_bytes: int,
        ahead: int,
        slice_bytes: int,
        one_pass_bytes: int,
        spin_ns: int,
        yields: int,
    ) -> None: ...
    def advance(
        self, address: int, bytes: int, code: int, word: int, first: int, step: int, /
    ) -> int: ...
