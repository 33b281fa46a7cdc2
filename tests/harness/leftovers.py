"""Each test leaves nothing: what is found after it and was not there before it fails it by name.

Looked at after a test: processes below this one, sockets at which this process listens, and names
in this process's directory for temporary files. A look takes as long as a short test, so short ones
share one. Fixtures of a module may hold some of it until the module's last test is over. `run`
looks at what all test processes share: mounts, links, network namespaces, shared memory, the
checkout.

The servers that ranks are forked from end with the process.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import machine_state, process_tree

LOOK_S = float(os.environ.get("SHOAL_TESTS_LOOK_S", "0.3"))  # from one look to the next
WAIT_S = 2.0  # a process that was told to end needs a moment, and a thread that closes a socket


class Held(NamedTuple):
    """What a test process holds: ids of processes, kernel names of sockets, names of files."""

    processes: frozenset[int]
    sockets: frozenset[str]
    files: frozenset[str]

    def since(self, before: Held) -> list[str]:
        """Return a name for each that `before` does not have."""
        processes = [f"process {pid}" for pid in self.processes - before.processes]
        files = [f"file {name}" for name in self.files - before.files]
        return sorted([*processes, *(self.sockets - before.sockets), *files])

    def joined(self, other: Held) -> Held:
        """Return what either of the two has."""
        return Held(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


def held_now() -> Held:
    """Return what this process holds, without the servers that stay as long as it does."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    processes = process_tree.descendants(os.getpid())
    own = process.current_process()._config.get("tempdir")  # of multiprocessing's sockets
    files = {path for path in Path(tempfile.gettempdir()).iterdir() if str(path) != own}
    return Held(
        frozenset(set(processes) - servers),
        frozenset(machine_state.listening_sockets()),
        frozenset(str(path) for path in files if not path.name.startswith(machine_state.STAYS)),
    )


class Leftovers:
    """The plugin of one test process.

    Attributes:
        before: what was there when the tests of a module began, and what wider fixtures hold.
        first_seen: the test after which something new was there, by its name. Others may stand
            before it that had no look of their own.
        shared: names on this machine that were there before, or that `run` has been told.
    """

    def __init__(self) -> None:
        self.before = held_now()
        self.first_seen: dict[str, str] = {}
        self._unseen: list[str] = []
        self._looked_s = 0.0
        self.shared = set(machine_state.shared_names())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        """Let a fixture of the session hold what it likes."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        before = held_now()
        value = yield
        after = held_now()
        new = Held(*(now - then for now, then in zip(after, before, strict=True)))
        self.before = self.before.joined(new)
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        """Look after each test, and judge once the fixtures of its module are gone."""
        value = yield
        self._unseen.append(item.nodeid)
        is_last = nextitem is None or nextitem.path != item.path
        if is_last or time.monotonic() - self._looked_s >= LOOK_S:
            self._look()
        if is_last:
            self._judge()
        return value

    def _look(self) -> None:
        tests = self._unseen[0]
        if len(self._unseen) > 1:
            tests += f" or one of the {len(self._unseen) - 1} after it"
        for name in held_now().since(self.before):
            self.first_seen.setdefault(name, tests)
        self._tell_shared_names(tests)
        self._unseen, self._looked_s = [], time.monotonic()

    def _tell_shared_names(self, test: str) -> None:
        """Tell `run` after which test a name first was there, should it be there at the end."""
        new = set(machine_state.shared_names()) - self.shared
        self.shared |= new
        if new and machine_state.FIRST_SEEN in os.environ:
            with open(os.environ[machine_state.FIRST_SEEN], "a", encoding="utf-8") as file:
                file.writelines(f"{name}\t{test}\n" for name in sorted(new))

    def _judge(self) -> None:
        limit_s = time.monotonic() + WAIT_S
        while (left := held_now().since(self.before)) and time.monotonic() < limit_s:
            gc.collect()  # a socket in a cycle of objects is open until then
            time.sleep(0.05)
        lines = [f"{name}, by {self.first_seen.get(name, 'a fixture')}" for name in left]
        now = held_now()
        for pid in now.processes - self.before.processes:
            named = f"process {pid}, by "
            test = process_tree.test_of(pid) or self.first_seen.get(f"process {pid}", "a fixture")
            line = f"process {pid}: {process_tree.command_of(pid)}, by {test}"
            lines = [line if one.startswith(named) else one for one in lines]
        process_tree.end(sorted(now.processes - self.before.processes))
        self.before = held_now()
        if left:
            pytest.fail("left behind: " + "; ".join(lines), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    """Take part in processes that run tests, not in the one that hands them out."""
    is_distributor = bool(getattr(config.option, "numprocesses", None))
    if not os.path.isdir("/proc/self/task") or is_distributor:
        return
    if hasattr(config, "workerinput") or machine_state.FIRST_SEEN not in os.environ:
        # What other processes leave in a directory is not to be taken for what this one does.
        own = tempfile.mkdtemp(prefix=machine_state.OF_PROCESS)
        os.chmod(own, 0o755)
        os.environ["TMPDIR"] = tempfile.tempdir = own
        # After multiprocessing has removed its own directory (priority -100).
        util.Finalize(None, shutil.rmtree, (own, True), exitpriority=-200)
    config.pluginmanager.register(Leftovers(), "leftovers of tests")
