"""`python -m shoal.comm.algorithms.measure FILE -n 4`: how long each algorithm takes here, into a table for `auto`.

On several hosts start it under your launcher, one process a rank, without -n:

    srun -N 4 -n 8 python -m shoal.comm.algorithms.measure table.json
    torchrun --nnodes 4 --nproc-per-node 2 ... -m shoal.comm.algorithms.measure table.json

Rows of the same world are replaced, others stay: call it once for each world that you train on. Then train with
`--strategy ddp,allreduce=auto,table=table.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.comm.algorithms.table import parse
from shoal.comm.algorithms.timing import measure, this_machine
from shoal.errors import ShoalError, UsageError
from shoal.launch.environment import read
from shoal.launch.local import run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.comm.algorithms.measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="table to write or to add to")
    parser.add_argument("-n", "--processes", type=int, help="ranks to start on this machine")
    parser.add_argument("--machine", default=this_machine(), help="its name in the table (default: %(default)s)")
    options = parser.parse_args(arguments)
    world = read(os.environ).world
    if world == 1 and (options.processes or 1) < 2:
        raise UsageError("one rank has nothing to reduce. Give -n 2 or more, or start this under a launcher.")
    if world > 1 and options.processes is not None:
        raise UsageError(f"-n {options.processes}: a launcher has started {world} ranks already. Leave -n out.")
    if options.file.exists():
        parse(_text(options.file), str(options.file))
    if world > 1:
        measure(options.file, options.machine)
        return 0
    return run(measure, (options.file, options.machine), options.processes)


def _text(file: Path) -> str:
    with suppress(OSError, UnicodeError):
        return file.read_text()
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShoalError as error:
        sys.exit(f"shoal: {error}")
