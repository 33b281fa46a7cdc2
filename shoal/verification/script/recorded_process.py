"""One process of a recorded run: the script under a recorder. The target of the launcher."""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import StrategyRefused, UsageError
from shoal.launch.rank import script
from shoal.verification.script.float64_everywhere import Float64Everywhere
from shoal.verification.script.loader_batches import BatchTape, JoinedBatches
from shoal.verification.script.perturbation import perturbation
from shoal.verification.script.run_record import RankRecord, RecordWriter, read_run
from shoal.verification.script.same_start import SameStart, turn_dropout_off
from shoal.verification.script.script_recorder import EnoughSteps, ScriptRecorder
from shoal.verification.script.written_files import WrittenFiles

Arithmetic = Literal["fp64", "fp32", "bf16", "fp16", "script"]


@dataclass(frozen=True)
class RecordingPlan:
    """All that a process needs to know to record its part of a run.

    Attributes:
        folder: of the record.
        steps: the script ends after so many optimizer steps.
        precision: "fp64" promotes the script; "script" leaves it as it is; the others tell
            `shoal.init` what to compute in, and leave scripts without Shoal as they are.
        like: the record of the run on many ranks, whose batches and weights this one process
            gets; None for that run itself.
        without_dropout: dropout is off under Shoal too, not only in other scripts.
        perturb: (record of one process, seed): weights are moved by its rounding units.
    """

    folder: str
    steps: int
    precision: Arithmetic = "fp64"
    like: str | None = None
    perturb: tuple[str, int] | None = None
    without_dropout: bool = False


def record_script(path: str, arguments: list[str], plan: RecordingPlan) -> None:
    """Run a script as `python path` would, and write the record of this rank."""
    _hide_gpu()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record = RankRecord(rank, world)
    writer = RecordWriter(Path(plan.folder), rank)
    with ExitStack() as stack:
        if plan.precision == "fp64":
            stack.enter_context(Float64Everywhere())
        WrittenFiles(writer.folder / "files").start(stack)
        turn_dropout_off(stack, record, plan.without_dropout)
        recorder = _recorder(writer, record, plan, stack)
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        recorder.start()
        stack.callback(recorder.stop)
        try:
            script(path, arguments)
            record.ended = "script"
        except EnoughSteps:
            record.ended = "steps"
        except (StrategyRefused, UsageError) as refusal:
            record.refusal = str(refusal)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
            record.ended = "script"


def _recorder(
    writer: RecordWriter, record: RankRecord, plan: RecordingPlan, stack: ExitStack
) -> ScriptRecorder:
    """Return the recorder, and let loaders record batches, or yield recorded ones."""
    if plan.like is None:
        BatchTape(writer, record).start(stack)
        return ScriptRecorder(writer, record, plan.steps)
    folder = Path(plan.like)
    ranks = read_run(folder)
    JoinedBatches(folder, ranks).start(stack)
    moved = None
    if plan.perturb is not None:
        moved = perturbation(Path(plan.perturb[0]), plan.perturb[1])
    return ScriptRecorder(writer, record, plan.steps, SameStart(folder, ranks, record), moved)


def _hide_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
