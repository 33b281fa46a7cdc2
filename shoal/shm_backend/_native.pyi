from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.distributed_c10d import Work

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

class CompiledCalls:
    def __init__(
        self,
        large_bytes: int,  # the first size of `large`
        calls_at: int,  # index of the word CALLS
        all_reduce_word: int,  # of a sum, without dtype and length
        broadcast_word: int,  # without dtype, root and length
        /,
        *,
        small: NativeAllReduce,
        large: NativeAllReduce,
        tensor: type,
        strided: Any,
        allreduce_options: type,
        broadcast_options: type,
        dtypes: Mapping[Any, int],
        number_of_modes: Callable[[], int],
        is_profiling: Callable[[], bool],
        queue: Any,
        jobs: Any,
        acquire: Callable[..., bool],
        release: Callable[[], None],
        give_up: Callable[[BaseException], None],
        completed: Work,
        completed_work: Callable[[Any], Work],
        writer: Any,
        begin_progress: Callable[[int, int], None],
        go_on: Callable[..., Work],
    ) -> None: ...
    def all_reduce(self, tensors: Any, opts: Any, /) -> Work | None: ...
    def broadcast(self, *args: Any) -> Work | None: ...
    def take_over(self) -> None: ...
