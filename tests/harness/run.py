"""`python -m tests.harness.run [--beside COMMAND] ARGUMENTS OF PYTEST`: a run of the tests.

                      +- pytest -+- test process -- fork server -- ranks
    this process -----+          +- test process ...
     (adopts orphans) +- COMMAND, such as `make lint`

pytest has a directory for temporary files of its own. At the end no process and no name of
`machine_state` may be there that was not there before: what is left is named and ended, and the
run has failed.

The exit code is that of pytest, or else of COMMAND, or 1 where something was left.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from shoal.platform.processes import adopt_orphans
from tests.harness import machine_state, process_tree

NEAR = 0.8  # of the goal, from which on a run says that it comes near to it
POLL_S = 0.1
END_S = 20.0  # for pytest to name the tests that were running
OUT_OF_TIME = 124  # as timeout(1)


def main() -> int:
    """Run pytest, and the command beside it. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.run")
    parser.add_argument("--beside", default="", help="a command that runs at the same time")
    parser.add_argument("--goal-s", type=float, default=0.0, help="say so if it comes near to it")
    parser.add_argument("--limit-s", type=float, default=0.0, help="end the run after this time")
    options, arguments = parser.parse_known_args()
    adopt_orphans()
    # Compiled kernels are worth keeping from one run to the next.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    # pytest rewrites each module of tests, for seconds of every test process and every run.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    directory = Path(tempfile.mkdtemp(prefix="shoal-tests-"))
    directory.chmod(0o755)  # tests of other users' files go through it, as through /tmp
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    first_seen = directory / "pytest-of-all.first-seen"
    first_seen.touch()
    os.environ[machine_state.FIRST_SEEN] = str(first_seen)
    before = machine_state.state()
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        beside = _start(options.beside.split(), output)
        pytest = _start([sys.executable, "-m", "pytest", *arguments])
        assert pytest is not None
        own = {child.pid for child in (pytest, beside) if child is not None}
        code = _wait(pytest, own, options.limit_s)
        if beside is not None:
            code = code or beside.wait()
            output.seek(0)
            print(output.read().decode(), end="")
    left = _end_processes() + machine_state.left_since(before)
    for name in left:
        print(f"left behind: {name}{_tests_of(name, first_seen)}")
    if code or left:
        print(f"files of the tests: {directory}")
    else:
        shutil.rmtree(directory)
    _tell_time(time.monotonic() - began_s, options.goal_s)
    return code or (1 if left else 0)


def _start(command: list[str], output: IO[Any] | None = None) -> subprocess.Popen[bytes] | None:
    if not command:
        return None
    return subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT)


def _wait(pytest: subprocess.Popen[bytes], own: set[int], limit_s: float) -> int:
    """Wait for pytest's end, and reap orphans meanwhile. Return its exit code."""
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal's Ctrl-C reaches pytest itself
    signal.signal(signal.SIGTERM, lambda *_: pytest.terminate())
    end_s = time.monotonic() + limit_s if limit_s else float("inf")
    while pytest.poll() is None:
        time.sleep(POLL_S)
        process_tree.reap_orphans(own)
        if time.monotonic() >= end_s:
            print(f"the limit of {limit_s:g} s is over: the tests are ended", flush=True)
            pytest.send_signal(signal.SIGINT)
            try:
                pytest.wait(END_S)
            except subprocess.TimeoutExpired:
                pytest.kill()
            return OUT_OF_TIME
    return pytest.returncode


def _end_processes() -> list[str]:
    """End all processes that are left, and return a line for each."""
    left = process_tree.descendants(os.getpid())
    lines = [
        f"process {pid}: {process_tree.command_of(pid)} {process_tree.test_of(pid)}".rstrip()
        for pid in left
    ]
    process_tree.end(left)
    return lines


def _tests_of(left: str, first_seen: Path) -> str:
    """Return the tests after which a shared name was first seen, one for each test process."""
    rows = [line.split("\t") for line in first_seen.read_text(encoding="utf-8").splitlines()]
    tests = [test for name, test in rows if name == left]
    return f", first seen after {' or '.join(tests)}" if tests else ""


def _tell_time(took_s: float, goal_s: float) -> None:
    text = f"the run took {took_s / 60:.1f} min"
    if goal_s and took_s > NEAR * goal_s:
        place = "over" if took_s > goal_s else "near to"
        text += f", {place} its limit of {goal_s / 60:g} min: make tests faster, or fewer"
    print(text)


if __name__ == "__main__":
    sys.exit(main())
