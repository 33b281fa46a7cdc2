"""`--strategy auto`: the planner's choice, made once for a run.

The run directory keeps the choice with all other settings, so a run that goes on keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.config.job import Job
from shoal.costs.machine import Machine
from shoal.errors import StrategyRefused
from shoal.planner.find_machine import find_machine, one_machine
from shoal.planner.job_workload import job_workload
from shoal.planner.plan_report import choice_text
from shoal.planner.script_workload import plan_in_script
from shoal.planner.strategy_search import Planner, Workload
from shoal.train.run_directory import CONFIG, job_of


def choose(job: Job, ranks: int) -> tuple[str, str]:
    """Return the strategy line for a job on one host, and a sentence with the reason.

    Raises: StrategyRefused: no strategy fits.
    """
    directory = Path(job.directory)
    if (directory / CONFIG).is_file():
        kept = job_of(directory).strategy
        return kept, f"strategy auto: {kept}, as the run in {directory} has it"
    return _choice(job_workload(job), find_machine("", ranks), ranks)


def choose_for_script(words: Sequence[str], ranks: int, accumulate: int = 0) -> tuple[str, str]:
    """Return the strategy line for a script on one host, and a sentence with the reason.

    Args:
        words: its file, and its own words.
        accumulate: as for `plan_in_script`.

    Raises:
        StrategyRefused: no strategy fits.
        UsageError: the script cannot be followed.
    """
    machine = find_machine("", ranks)  # the process of the script sees no GPU
    return plan_in_script(words, ranks, _choice, machine, ranks, accumulate=accumulate)


def _choice(workload: Workload, machine: Machine, ranks: int) -> tuple[str, str]:
    planner = Planner(workload, machine, one_machine(machine, ranks))
    plans = planner.search()
    if plans.best is None:
        raise StrategyRefused(choice_text(planner, plans))
    return plans.best.strategy, choice_text(planner, plans)
