"""Records a loop in a rank of a world, by the recorder that `shoal.verify_script` runs scripts in.

Candidates train on all ranks; each reference in one rank alone, so that ranks share them out.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from shoal.verification.script.loader_batches import BatchTape, JoinedBatches
from shoal.verification.script.run_record import RankRecord, RecordWriter, read_run
from shoal.verification.script.same_start import Float64Everywhere, SameStart, turn_dropout_off
from shoal.verification.script.script_recorder import EnoughSteps, ScriptRecorder
from tests.mutants.loop import STEPS, Loop
from tests.mutants.peers import Peers


def record_candidate(loop: type[Loop], folder: Path, peers: Peers, seed: int) -> None:
    """Train on all ranks, and write the record. Collective."""
    record = RankRecord(peers.rank, peers.size)
    writer = RecordWriter(folder, peers.rank)
    with ExitStack() as stack:
        _prepare(stack, record)
        BatchTape(writer, record).start(stack)
        _train(stack, loop(peers, seed), ScriptRecorder(writer, record, STEPS))


def record_reference(loop: type[Loop], folder: Path, like: Path, seed: int) -> None:
    """Train in this process alone, on the batches of all ranks, and write the record.

    Args: like: the record of the ranks.
    """
    record, ranks = RankRecord(0, 1), read_run(like)
    writer = RecordWriter(folder, 0)
    with ExitStack() as stack:
        _prepare(stack, record)
        JoinedBatches(like, ranks).start(stack)
        start = SameStart(like, ranks, record)
        recorder = ScriptRecorder(writer, record, STEPS, start)
        _train(stack, loop(Peers(0, 1), seed), recorder)


def _prepare(stack: ExitStack, record: RankRecord) -> None:
    stack.enter_context(Float64Everywhere())
    turn_dropout_off(stack, record, lambda: record.by_shoal)


def _train(stack: ExitStack, loop: Loop, recorder: ScriptRecorder) -> None:
    recorder.start()
    stack.callback(recorder.stop)
    with suppress(EnoughSteps):  # where it begins a step more
        loop.train()
    if len(recorder.record.steps) < STEPS:
        raise AssertionError(f"{type(loop).__name__} took fewer than {STEPS} steps")
