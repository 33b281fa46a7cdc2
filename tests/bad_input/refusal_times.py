"""Take the time of every odd command, each in a fork of a process that has read the program only.

python refusal_times.py DIRECTORY [STEP]    every STEP-th command, in a directory of odd files

Prints JSON: for each command its name, its seconds, its exit status, and whether it needed torch.
To start Python and read the program comes on top, and is the first entry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from odd_commands import Command, commands, name_of
from odd_files import make_files

from shoal import cli

Times = list[tuple[str, float, int, bool]]


def start_s() -> float:
    """Return the seconds that a new process needs to read the program."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "from shoal import cli"], check=True)
    return time.perf_counter() - started_s


def run(command: Command) -> tuple[float, int, bool]:
    """Return the seconds of a command in a fork, its status, and whether torch was imported."""
    reading, writing = os.pipe()
    started_s = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        status = 1
        try:
            status = cli.main(command)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        finally:
            os.write(writing, b"torch" if "torch" in sys.modules else b"")
            os._exit(status)
    os.close(writing)
    _, waited = os.waitpid(pid, 0)
    time_s = time.perf_counter() - started_s
    needed_torch = os.read(reading, 16) == b"torch"
    os.close(reading)
    return time_s, os.waitstatus_to_exitcode(waited), needed_torch


def main() -> None:
    directory, step = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    make_files(directory)
    os.chdir(directory)
    assert "torch" not in sys.modules
    times: Times = [("start of a process", start_s(), 0, False)]
    for command in list(dict.fromkeys(commands()))[::step]:
        times.append((name_of(command), *run(command)))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
