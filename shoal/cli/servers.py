"""`shoal servers`: list, add and remove the parameter servers of a running job.

The coordinator of the job executes the command, and training goes on meanwhile. The command returns
when it is done: for `remove`, when all partitions of the shard have moved.
"""

from __future__ import annotations

import argparse

from shoal.cli import answers, argument_types
from shoal.errors import UsageError

HELP = "list, add or remove the parameter servers of a run"
EXAMPLES = """\
  shoal servers runs/digits                     which server owns what
  shoal servers runs/digits add                 one more, while it trains
  shoal servers runs/digits remove 1            its parameters move to the others first
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=argument_types.path, help="run directory")
    parser.add_argument(
        "what", nargs="?", choices=("list", "add", "remove"), default="list", help="(default: list)"
    )
    parser.add_argument(
        "numbers",
        nargs="*",
        type=argument_types.integer(0, 4096),
        metavar="N",
        help="add: how many (default: 1); remove: which shards",
    )


def run(options: argparse.Namespace) -> int:
    if options.what == "remove" and not options.numbers:
        raise UsageError(f"remove: say which shard, as in `shoal servers {options.run} remove 1`.")
    if options.what == "add" and (
        len(options.numbers) > 1 or any(number < 1 for number in options.numbers)
    ):
        raise UsageError(
            f"add: takes one number of at least 1, got {' '.join(map(str, options.numbers))}."
        )
    if options.what == "list" and options.numbers:
        raise UsageError(f"list: takes no number, got {' '.join(map(str, options.numbers))}.")
    from shoal.parameter_server.coordinator import admin_client

    servers = admin_client.send_command(options.run, options.what, options.numbers)
    return answers.show(options, servers, admin_client.table(servers))
