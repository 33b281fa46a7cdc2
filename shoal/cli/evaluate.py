"""`shoal eval`: evaluate a run on every validation sample.

It runs on any number of processes, whatever number has trained, and the result is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import answers, argument_types
from shoal.config.job import is_path
from shoal.errors import UsageError, raise_problems

if TYPE_CHECKING:
    from shoal.config.job import Job

HELP = "evaluate a run on every validation sample"
EXAMPLES = """\
  shoal eval runs/digits                        the newest checkpoint
  shoal eval runs/digits -n 4 --checkpoint best --json
  shoal eval runs/digits -n 2 --strategy zero3  a model that no process has room for
  shoal eval --cfg resnet18.yaml MODEL.WEIGHTS ckpt_ep_100.pth.tar     a file of distribuuuu's
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="*", help="run directory; with --cfg: distribuuuu's KEY VALUE pairs"
    )
    parser.add_argument(
        "--cfg",
        type=argument_types.path,
        help="a distribuuuu YAML file; evaluates MODEL.WEIGHTS, without a run",
    )
    argument_types.processes_argument(parser, "processes on this machine (default: 1)")
    argument_types.checkpoint_argument(parser)
    parser.add_argument(
        "--strategy",
        metavar="LINE",
        help="divide the model as this strategy does, whatever it was trained with, e.g. zero3",
    )


def run(options: argparse.Namespace) -> int:
    from shoal.launch.environment import own_place
    from shoal.train import entry

    info = own_place(options.processes)
    world = options.processes or info.world
    arguments = _arguments(options, world)
    if info.world > 1 or world == 1:
        entry.evaluate(*arguments)
        return 0
    from shoal.launch.restarting import RestartingRun, Work

    work = Work("shoal.train.entry:evaluate", arguments, preload=entry.PRELOAD)
    code = RestartingRun(work, world).run()
    if code and options.json:
        answers.show_error("eval", True, f"a rank has ended with exit code {code}; stderr says why")
    return code


def _arguments(options: argparse.Namespace, world: int) -> tuple[Job | Path, Any, str | None, bool]:
    """Return the arguments of `entry.evaluate`. All checks are made here, before ranks start."""
    from shoal.train.run_directory import job_of

    if options.cfg is not None:
        if options.strategy is not None:
            raise UsageError("--strategy: only for a run, as in `shoal eval RUN --strategy zero3`.")
        return _job_of_cfg(options, world), "latest", None, options.json
    if len(options.run) != 1 or not is_path(options.run[0]):
        raise UsageError("one run directory is needed, as in `shoal eval runs/digits`.")
    directory = Path(options.run[0])
    job_of(directory)
    if options.checkpoint != "latest":
        from shoal.checkpoint.search import checkpoint_at

        # It is there; ranks read what it holds.
        checkpoint_at(directory / "checkpoints", options.checkpoint, {})
    if options.strategy is not None:
        from shoal.strategies import parse_line
        from shoal.strategies.precheck import check

        raise_problems(check(parse_line(options.strategy), world))
    return directory, options.checkpoint, options.strategy, options.json


def _job_of_cfg(options: argparse.Namespace, ranks: int) -> Job:
    """Return the job of a distribuuuu command line whose weights are to be evaluated.

    Raises:
        ConfigError: the command line is wrong, or names something that is not there.
        UsageError: it names no weights.
    """
    from shoal.config import translate
    from shoal.train import job_precheck

    settings, _ = translate(options.cfg, options.run, ranks)
    if settings.job.model.weights is None:
        raise UsageError(
            "--cfg: no weights are named; add MODEL.WEIGHTS and a file, such as ckpt_ep_100.pth.tar"
        )
    raise_problems(job_precheck.problems(settings.job))
    return settings.job
