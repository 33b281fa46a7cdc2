"""Phase boards of several ranks in one process, driven in any order of turns."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hypothesis import strategies as st

from shoal.shm_backend.phase_board import SIZE_BYTES, CallSignature, PhaseBoard, Steps
from shoal.shm_backend.segment import SharedSegment, attach

Program: TypeAlias = Sequence[tuple[CallSignature, Callable[[], Steps]]]
Turns = st.lists(st.integers(0, 3), max_size=400)


def meet(size: int) -> list[PhaseBoard]:
    """Return the boards of `size` ranks that have attached each other's segments."""
    memories = [SharedSegment(SIZE_BYTES) for _ in range(size)]
    boards = []
    for rank, memory in enumerate(memories):
        peers = {}
        for peer in range(size):
            if peer != rank and (segment := attach(memories[peer].description)) is not None:
                peers[peer] = segment
        boards.append(PhaseBoard(rank, memory, peers))
    for memory in memories:
        memory.close()
    return boards


def drive(ranks: Sequence[PhaseBoard], programs: Sequence[Program], turns: Any) -> None:
    """Let each rank make its calls in sequence.

    Args: turns: the rank that takes the next step, from the last entry on; all in turn afterwards.
    """
    running = {
        rank: _progress(board, program)
        for rank, (board, program) in enumerate(zip(ranks, programs, strict=True))
    }
    remaining = list(turns)
    while running:
        phases = [board.phase for board in ranks]
        order = [remaining.pop() % len(ranks)] if remaining else list(running)
        outcomes = {rank: next(running[rank], "over") for rank in order if rank in running}
        stuck = set(outcomes.values()) == {"waits"} and phases == [board.phase for board in ranks]
        assert not stuck or len(order) < len(running), "all wait for each other"
        running = {rank: life for rank, life in running.items() if outcomes.get(rank) != "over"}


def _progress(board: PhaseBoard, program: Program) -> Any:
    """Make the calls of one rank; yield once for each step or failed test of a condition."""
    for call, start in program:
        board.begin(call, call.encoded)
        for condition, phase in start():
            while not condition(phase):
                yield "waits"
            yield "went on"
