"""Ranks that meet in one process, driven in any order."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hypothesis import strategies as st

from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.phase_board import SIZE_BYTES, PhaseBoard, Steps
from shoal.shm_backend.segment import SharedSegment, attach

Program: TypeAlias = Sequence[tuple[CallSignature, Callable[[], Steps]]]
Turns = st.lists(st.integers(0, 3), max_size=400)


def meet(size: int) -> list[PhaseBoard]:
    memories = [SharedSegment(SIZE_BYTES) for _ in range(size)]
    found = []
    for rank, memory in enumerate(memories):
        others = {
            other: attach(memories[other].description) for other in range(size) if other != rank
        }
        found.append(
            PhaseBoard(rank, memory, {other: a for other, a in others.items() if a is not None})
        )
    for memory in memories:
        memory.close()
    return found


def drive(ranks: Sequence[PhaseBoard], programs: Sequence[Program], turns: Any) -> None:
    """Each rank makes its calls one after the other; `turns` says who may go on next, as far as
    it reaches.
    """
    lives = [_life(board, program) for board, program in zip(ranks, programs, strict=True)]
    alive = dict(enumerate(lives))
    left = list(turns)
    while alive:
        before, order = (
            [board.phase for board in ranks],
            [left.pop() % len(ranks)] if left else list(alive),
        )
        said = {rank: next(alive[rank], "over") for rank in order if rank in alive}
        stuck = set(said.values()) == {"waits"} and before == [board.phase for board in ranks]
        assert not stuck or len(order) < len(alive), "all wait for each other"
        alive = {rank: life for rank, life in alive.items() if said.get(rank) != "over"}


def _life(board: PhaseBoard, program: Program) -> Any:
    for call, start in program:
        board.begin(call, call.encoded)
        for condition, phase in start():
            while not condition(phase):
                yield "waits"
            yield "went on"
