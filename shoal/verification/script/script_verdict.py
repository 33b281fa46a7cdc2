"""`shoal.verify_script`: run a script on many ranks and in one process, and compare."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from shoal.errors import UsageError
from shoal.launch import preload
from shoal.launch.start import start
from shoal.run.preparation import Draws
from shoal.strategies import build_strategies, parse_line
from shoal.strategies.precheck import check
from shoal.testing.world import World
from shoal.verification.script.loader_batches import axes_of_batches
from shoal.verification.script.run_comparison import compare_runs
from shoal.verification.script.run_record import RankRecord, read_run
from shoal.verification.script.script_recorder import RecordingPlan, record_script
from shoal.verification.script.script_report import ScriptReport
from shoal.verification.script.step_comparison import EXACT
from shoal.verification.verdict import draws_of

TIMEOUT_S = 600.0
"""For each run."""

NO_STEP = (
    "verify: {script} ended without a step of an optimizer of torch.optim, so there is nothing to "
    "compare. Give it arguments with which it trains."
)
NO_LOADER = (
    "verify: {script} takes its batches from no torch.utils.data.DataLoader, and its ranks compute "
    "on different ones, so one process cannot be given the batches of all. Take them from a "
    "DataLoader."
)


def verify_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    strategy: str | None = None,
    steps: int = 3,
    tolerance: float = EXACT,
    keep: str | Path | None = None,
) -> ScriptReport:
    """Run a script on `ranks` processes of this machine and alone, and compare step by step.

    The script is not changed, and nothing that it prints is shown. It computes in float64, and is
    ended after `steps` steps.

    Args:
        script: a Python file.
        arguments: of the script.
        ranks: the number of processes that train together.
        strategy: in place of the one that the script gives to `shoal.init`.
        steps: optimizer steps to compare.
        tolerance: the largest relative error that counts as rounding.
        keep: folder for the records, `reference` and `candidate`; they are deleted otherwise.

    Raises:
        ConfigError: there is no such strategy.
        UsageError: `ranks` or `steps` is below 1; the script cannot be read, or takes no step, or
            its ranks compute on batches that no DataLoader gives.
        LaunchError: the script failed; the message has its traceback.
    """
    if not Path(script).is_file():
        raise UsageError(f"verify: there is no script {script}. Give the path of a Python file.")
    if ranks < 1 or steps < 1:
        raise UsageError(f"verify: ranks={ranks}, steps={steps}: each must be at least 1.")
    variables: dict[str, str] = {}
    draws: Draws = "global"
    if strategy is not None:
        line = parse_line(strategy)
        build_strategies(line)  # its errors are raised here, once, and not in every rank
        if refusals := check(line, ranks):
            return ScriptReport("refused", ranks, notes=refusals[:1])
        variables["SHOAL_STRATEGY"] = strategy
        draws = draws_of(line)
    folders: AbstractContextManager[str] = nullcontext(str(keep))
    if keep is None:
        folders = tempfile.TemporaryDirectory(prefix="shoal-proof-")
    with folders as folder:
        one, many = Path(folder, "reference"), Path(folder, "candidate")
        plan = RecordingPlan(str(script), tuple(arguments), str(many), steps, draws)
        records = _recorded(plan, ranks, variables)
        refusals = [record.refusal or "" for record in records]
        if any(refusal.startswith('draws="global"') for refusal in refusals):
            plan = replace(plan, draws="rank")
            records = _recorded(plan, ranks, variables)
        if any(record.refusal is not None for record in records):
            return compare_runs(many, many)
        _check_record(Path(script), many, records, strategy)
        alone = replace(plan, folder=str(one), like=str(many))
        _recorded(alone, 1, {"SHOAL_STRATEGY": "single"})
        return compare_runs(one, many, tolerance)


def _recorded(plan: RecordingPlan, ranks: int, variables: Mapping[str, str]) -> list[RankRecord]:
    """Run the script of a plan on so many ranks, and return their records."""
    for rank in Path(plan.folder).glob("rank-*"):
        shutil.rmtree(rank)  # of an earlier record in the same folder
    settings = {
        "OMP_NUM_THREADS": "1",
        "SHOAL_DRAWS": plan.draws,
        "SHOAL_PRECISION": "fp64",
        "TORCHDYNAMO_DISABLE": "1",  # compiled modules call no hooks
        **variables,
    }
    modules = (*preload.TRAINING, preload.RUN, record_script.__module__)
    processes = start(record_script, (plan,), ranks, settings, "lines", preload=modules)
    with World(processes, TIMEOUT_S) as world:
        world.results()
    return read_run(Path(plan.folder))


def _check_record(
    script: Path, folder: Path, ranks: list[RankRecord], strategy: str | None
) -> None:
    """Raise UsageError where one process cannot do what the ranks have done."""
    if not any(record.steps for record in ranks):
        raise UsageError(NO_STEP.format(script=script))
    if strategy is not None and not ranks[0].by_shoal:
        raise UsageError(
            f"--strategy {strategy}: {script} does not train by Shoal, so no strategy of Shoal "
            "divides its work. Leave out --strategy to verify it as it is."
        )
    if ranks[0].by_shoal or any(record.loaders for record in ranks):
        return
    if axes_of_batches(folder, ranks)[0]["data"][1] > 1:
        raise UsageError(NO_LOADER.format(script=script))
