"""One process of a recorded run: the script under a recorder. The target of the launcher."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import StrategyRefused, UsageError
from shoal.launch.rank import script
from shoal.verification.script.float64_everywhere import Float64Everywhere
from shoal.verification.script.run_record import RankRecord, RecordWriter
from shoal.verification.script.script_recorder import EnoughSteps, ScriptRecorder

Arithmetic = Literal["fp64", "fp32", "bf16", "fp16", "script"]


@dataclass(frozen=True)
class RecordingPlan:
    """All that a process needs to know to record its part of a run.

    Attributes:
        folder: of the record.
        steps: the script ends after so many optimizer steps.
        precision: "fp64" promotes the script; "script" leaves it as it is; the others tell
            `shoal.init` what to compute in, and leave scripts without Shoal as they are.
    """

    folder: str
    steps: int
    precision: Arithmetic = "fp64"


def record_script(path: str, arguments: list[str], plan: RecordingPlan) -> None:
    """Run a script as `python path` would, and write the record of this rank."""
    _hide_gpu()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record = RankRecord(rank, world)
    recorder = ScriptRecorder(RecordWriter(Path(plan.folder), rank), record, plan.steps)
    with ExitStack() as stack:
        if plan.precision == "fp64":
            stack.enter_context(Float64Everywhere())
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


def _hide_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
