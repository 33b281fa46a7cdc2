"""Names on this machine that a test could leave: what stands there now, kind by kind.

Each kind has one function that returns the names of today; what is there after a run and was not
there before it has been left behind. Other programs of the machine make names too, so the kinds
that everybody uses count only those that Python, torch and Shoal choose.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHES = (
    "__pycache__/",
    ".import_linter_cache/",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".hypothesis/",
)
OURS_IN_SHARED_MEMORY = ("shoal", "torch_", "psm_", "pymp-", "sem.mp-")
FIRST_SEEN = "SHOAL_TESTS_FIRST_SEEN"
"""The file in which test processes note the test after which a shared name first was there."""
OF_PROCESS = "process-"
"""Begins the name of a test process's own directory."""
STAYS = ("pytest-of-", "torchinductor_", "pymp-", "shoal-proof-", "shoal-servers-", OF_PROCESS)
"""Names that may stay in the directory of a run and go with it: pytest's, compiled kernels, and
what a process removes at its end unless a test, or xdist at the end of a run, has killed it.
"""


def is_root() -> bool:
    """Return True if this process could make what only root can make."""
    return os.geteuid() == 0


def network_namespaces() -> set[str]:
    """Return the names that `ip netns` lists."""
    return _names(Path("/run/netns")) if is_root() else set()


def links() -> set[str]:
    """Return the network interfaces."""
    return _names(Path("/sys/class/net")) if is_root() else set()


def mounts() -> set[str]:
    """Return the directories on which something is mounted."""
    table = Path("/proc/self/mountinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    # The first `ip netns add` of a machine mounts this directory, for good.
    return {line.split()[4] for line in lines if is_root()} - {"/run/netns"}


def shared_memory() -> set[str]:
    """Return the names in /dev/shm that are ours."""
    return {name for name in _names(Path("/dev/shm")) if name.startswith(OURS_IN_SHARED_MEMORY)}


def temporary_files() -> set[str]:
    """Return all names in this run's temporary directory, and ours in those of the system.

    Those of `STAYS` are left out.
    """
    own = Path(tempfile.gettempdir())
    names = {own / name for name in _names(own) if not name.startswith(STAYS)}
    for place in {Path("/tmp"), Path("/var/tmp")} - {own}:
        ours = {name for name in _names(place) if name.startswith("shoal")}
        # Another run of the tests, or somebody's proof, may be there at the same time.
        names |= {place / name for name in ours if not name.startswith(("shoal-tests-", *STAYS))}
    return set(map(str, names))


def files_of_the_checkout() -> set[str]:
    """Return what git calls new or ignored, without caches. A person may edit files meanwhile."""
    command = ["git", "status", "--porcelain", "--ignored"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()  # none outside of a checkout
    return {line for line in lines if line.startswith(("??", "!!")) and not line.endswith(CACHES)}


SHARED: dict[str, Callable[[], set[str]]] = {
    "network namespace": network_namespaces,
    "network link": links,
    "mount": mounts,
    "shared memory": shared_memory,
}
KINDS: dict[str, Callable[[], set[str]]] = {
    **SHARED,
    "temporary file": temporary_files,
    "file in the checkout": files_of_the_checkout,
}


def shared_names() -> list[str]:
    """Return "KIND NAME" of what all processes of this machine see, and is quickly read."""
    return [f"{kind} {name}" for kind, names in SHARED.items() for name in names()]


def state() -> dict[str, set[str]]:
    """Return the names of all kinds."""
    return {kind: names() for kind, names in KINDS.items()}


def left_since(before: dict[str, set[str]]) -> list[str]:
    """Return "KIND NAME" of all that was not there before."""
    return [
        f"{kind} {name}" for kind, names in state().items() for name in sorted(names - before[kind])
    ]


def listening_sockets() -> set[str]:
    """Return the sockets at which this process listens, by the kernel's names.

    The sockets are asked themselves: the tables of /proc/net take the kernel milliseconds.
    """
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(target)
        except OSError:  # closed since: that of the listing itself, or by another thread
            continue
    return found


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError:
        return set()
