"""`shoal scale`: change the number of processes of a run while it trains.

The command sends a request to the launcher of the run and prints its answers as they arrive: first
that the processes stop and save, then that the new ones have started.
"""

from __future__ import annotations

import argparse

from shoal.cli import answers, argument_types
from shoal.errors import LaunchError, UsageError

HELP = "change the number of processes of a run while it trains"
EXAMPLES = """\
  shoal train digits -n 2                       in one terminal
  shoal scale runs/digits 4                     in another: four processes from now on
  shoal train digits --hosts a:2,b:4            on two hosts
  shoal scale runs/digits 3                     two processes on a and one on b from now on
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=argument_types.path,
        help="directory of a run that `shoal train` has started here, by -n or --hosts",
    )
    parser.add_argument(
        "processes",
        type=argument_types.processes,
        metavar="N",
        help="processes from now on. Of a run with --hosts: of all hosts together. They are filled "
        "in the order of the list, each up to its number there",
    )


def run(options: argparse.Namespace) -> int:
    from shoal.comm.parallel_dims import ParallelDims
    from shoal.launch.control_channel import request
    from shoal.strategies import build_strategies, parse_line
    from shoal.strategies.options import mesh_sizes
    from shoal.train.run_directory import job_of

    job = job_of(options.run)  # or an error, of a directory without a run
    batch, sizes = job.train.batch_size, mesh_sizes(build_strategies(parse_line(job.strategy)))
    if ParallelDims(**sizes).data(options.processes) > batch:
        raise UsageError(
            f"{options.run}: {options.processes} processes and a batch of {batch}: some would have "
            "no sample."
        )
    for answer in request(options.run, scale=options.processes):
        if "stopping" not in answer:
            step = answer["step"]
            origin = "the beginning" if step is None else f"the checkpoint of step {step}"
            text = f"{options.run}: {answer['processes']} go on, from {origin}"
            return answers.show(options, {"processes": answer["processes"], "step": step}, text)
        if not options.json:
            print(f"{options.run}: {answer['stopping']} processes stop and save", flush=True)
    raise LaunchError(f"{options.run}: its launcher has ended before it had answered.")
