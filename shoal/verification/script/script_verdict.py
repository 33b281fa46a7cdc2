"""`shoal.verify_script`: run a script on many ranks and in one process, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from shoal.errors import UsageError
from shoal.launch import preload
from shoal.launch.start import start
from shoal.strategies import build_strategies, parse_line
from shoal.strategies.precheck import check
from shoal.testing.world import World
from shoal.verification.script.likely_cause import NO_CAUSE
from shoal.verification.script.recorded_process import (
    Arithmetic,
    RecordingPlan,
    record_script,
)
from shoal.verification.script.run_comparison import compare_runs
from shoal.verification.script.script_report import ScriptReport
from shoal.verification.script.tolerances import EXACT
from shoal.verification.verdict import draws_of


def verify_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    strategy: str | None = None,
    steps: int = 3,
    precision: Arithmetic = "fp64",
    tolerance: float = EXACT,
    keep: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> ScriptReport:
    """Run a script on `ranks` processes of this machine and alone, and compare step by step.

    Args:
        script: a Python file; it is not changed.
        arguments: of the script.
        ranks: the number of processes that train together.
        strategy: in place of the one that the script gives to `shoal.init`.
        steps: optimizer steps to compare; the script is ended after them.
        precision: "fp64" lets the script compute in float64.
        tolerance: the largest relative error that counts as rounding.
        keep: folder for the records, `reference` and `candidate`; they are deleted otherwise.
        environment: further variables of the run on many ranks.
        timeout_s: for each of the two runs.

    Raises:
        ConfigError: there is no such strategy.
        UsageError: `ranks` or `steps` is below 1, or the script cannot be read.
        LaunchError: the script failed; the message has its traceback.
    """
    path = Path(script)
    _check(path, ranks, steps)
    variables = {"OMP_NUM_THREADS": "1", "SHOAL_PRECISION": _for_init(precision)}
    variables = {name: value for name, value in variables.items() if value}
    if strategy is not None:
        line = parse_line(strategy)
        build_strategies(line)  # its errors are raised here, once, and not in every rank
        if refusals := check(line, ranks):
            return ScriptReport("refused", None, NO_CAUSE, 0, ranks, None, notes=refusals[:1])
        variables["SHOAL_DRAWS"] = draws_of(line)
    made = nullcontext(str(keep)) if keep is not None else tempfile.TemporaryDirectory()
    with made as folder:
        one, many = Path(folder, "reference"), Path(folder, "candidate")
        own = {"SHOAL_STRATEGY": strategy} if strategy is not None else {}
        _record(
            path,
            arguments,
            ranks,
            RecordingPlan(str(many), steps, precision),
            timeout_s,
            {**variables, **own, **(environment or {})},
        )
        _record(
            path,
            arguments,
            1,
            RecordingPlan(str(one), steps, precision),
            timeout_s,
            {**variables, "SHOAL_STRATEGY": "single"},
        )
        return compare_runs(one, many, tolerance)


def _record(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    plan: RecordingPlan,
    timeout_s: float,
    variables: Mapping[str, str],
) -> None:
    """Run the script once under the recorder."""
    for file in Path(plan.folder).glob("rank-*/index.json"):
        file.unlink()  # of an earlier record in the same folder
    processes = start(
        record_script,
        (str(script), list(arguments), plan),
        ranks,
        variables,
        "lines",
        preload=preload.TRAINING,
        wants_values=True,
    )
    with World(processes, timeout_s) as world:
        world.results()


def _check(script: Path, ranks: int, steps: int) -> None:
    if not script.is_file():
        raise UsageError(f"verify: there is no script {script}. Give the path of a Python file.")
    if ranks < 1 or steps < 1:
        raise UsageError(f"verify: ranks={ranks}, steps={steps}: each must be at least 1.")


def _for_init(precision: Arithmetic) -> str:
    return "" if precision == "script" else precision
