"""Faults that a rank lets happen: to itself, or to another process or file of its host.

Each is called with the Moment of the rank, in a forward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FAILING_S = 1.0
"""So long the storage fails."""
SHORT_S = 1.0
"""So long a process is stopped that continues; less than the limit of a hang."""


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def holds_the_interpreter(_: Any) -> None:
    ctypes.PyDLL(None).sleep(1000)


def ranks_of_this_host(moment: Any) -> list[int]:
    """Return the processes of all ranks here, this one last."""
    noted = [int(path.read_text()) for path in moment.folder.glob(f"pid.{os.uname().nodename}.*")]
    return sorted(noted, key=lambda pid: pid == os.getpid())


def kill_ranks(moment: Any) -> None:
    for pid in ranks_of_this_host(moment):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_worker(_: Any, number: int) -> None:
    """Signal a data-loader worker of this rank, once there is one."""
    while True:
        for pid in children(os.getpid()):
            name = Path(f"/proc/{pid}/comm")
            if name.exists() and name.read_text().strip() == "pt_data_worker":
                os.kill(pid, number)
                return
        time.sleep(0.001)


def stop_for_a_moment(pid: int) -> None:
    """Stop a process; another one lets it continue."""
    if os.fork() == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SHORT_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def kill_spawner_and_coordinator(moment: Any) -> None:
    coordinator = moment.pool.coordinator.pid
    os.kill(moment.pool.spawner._pid, signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)


def kill_servers_of_a_shard(moment: Any) -> None:
    for pid in moment.servers():
        os.kill(pid, signal.SIGKILL)


def kill_server_and_coordinator(moment: Any) -> None:
    os.kill(moment.servers()[0], signal.SIGKILL)
    os.kill(moment.pool.coordinator.pid, signal.SIGKILL)


def kill_rank_and_server(moment: Any) -> None:
    os.kill(moment.servers()[0], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_write(directories: Callable[[Any], Path]) -> Callable[[Any], None]:
    """Return a fault that kills this rank as soon as a checkpoint is being written."""

    def begin(moment: Any) -> None:
        threading.Thread(target=wait_and_kill, args=(moment,), daemon=True).start()

    def wait_and_kill(moment: Any) -> None:
        while not any(directories(moment).glob("checkpoints/*.tmp")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    return begin


def saved(moment: Any) -> list[Path]:
    """Return the directories of good checkpoints, the newest one last."""
    return sorted(moment.run.glob("checkpoints/step-????????"))


def damage(change: Callable[[Path], None]) -> Callable[[Any], None]:
    """Return a fault that changes the newest checkpoint's largest file, and kills this rank."""

    def act(moment: Any) -> None:
        files = [path for path in saved(moment)[-1].rglob("*") if path.is_file()]
        change(max(files, key=lambda path: path.stat().st_size))
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_newest(moment: Any) -> None:
    newest = saved(moment)[-1]
    newest.rename(moment.run / "away")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_writes(_: Any) -> None:
    """Let every write of this process to a file fail for a time: EFBIG, as beyond a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    timer = threading.Timer(FAILING_S, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    timer.daemon = True
    timer.start()


def remove_shared_memory(moment: Any) -> None:
    """Remove the files of this host's ranks in /dev/shm, as systemd does at a logout."""
    for pid in [*ranks_of_this_host(moment), os.getppid()]:
        for path in mapped(pid):
            path.unlink(missing_ok=True)


def mapped(pid: int) -> Iterator[Path]:
    """Return the files of /dev/shm that a process has mapped."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/dev/shm/"):
                yield Path(words[5].removesuffix(" (deleted)"))


# Of several hosts alone: agent ── fork server ─── ranks, store.


def agent() -> int:
    return parent(os.getppid())


def store() -> int:
    """Return the process of this host that listens at the ranks' rendezvous."""
    port = int(os.environ["MASTER_PORT"])
    sockets = {
        words[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for words in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port
    }
    for pid in children(os.getppid()):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(entry)[8:-1] in sockets:
                    return pid
    raise RuntimeError("the store is not on this host")


def ssh_session() -> int:
    """Return the ssh server's process of the connection to the agent."""
    return parent(agent())


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


RANK_FAULTS: dict[str, Callable[[Any], None]] = {
    "rank killed": lambda _: kill(os.getpid()),
    "rank killed, and again after the restart": lambda _: kill(os.getpid()),
    "all ranks of a host killed": kill_ranks,
    "rank crashes (SIGSEGV)": lambda _: kill(os.getpid(), signal.SIGSEGV),
    "rank stopped": lambda _: kill(os.getpid(), signal.SIGSTOP),
    "rank stopped for 1 s": lambda _: stop_for_a_moment(os.getpid()),
    "rank sleeps in a step": lambda _: time.sleep(1000),
    "rank in C, interpreter locked": holds_the_interpreter,
    "data blocks": lambda _: time.sleep(1000),
    "loader worker killed": lambda moment: kill_worker(moment, signal.SIGKILL),
    "loader worker stopped": lambda moment: kill_worker(moment, signal.SIGSTOP),
    "fork server killed": lambda _: kill(os.getppid()),
    "rank killed in a save": kill_in_a_write(lambda moment: moment.run),
    "newest checkpoint truncated, rank killed": damage(lambda path: os.truncate(path, 100)),
    "bit of the newest checkpoint flipped, rank killed": damage(flip_a_bit),
    "newest checkpoint gone, rank killed": remove_newest,
    "writes of a rank fail for 1 s": fail_writes,
    "/dev/shm emptied": remove_shared_memory,
    "spawner killed": lambda moment: kill(moment.pool.spawner._pid),
    "spawner and coordinator killed": kill_spawner_and_coordinator,
    "coordinator killed": lambda moment: kill(moment.pool.coordinator.pid),
    "coordinator stopped": lambda moment: kill(moment.pool.coordinator.pid, signal.SIGSTOP),
    "server killed": lambda moment: kill(moment.servers()[0]),
    "server stopped": lambda moment: kill(moment.servers()[0], signal.SIGSTOP),
    "server stopped for 1 s": lambda moment: stop_for_a_moment(moment.servers()[0]),
    "server and coordinator killed": kill_server_and_coordinator,
    "all servers of a shard killed": kill_servers_of_a_shard,
    "rank and server killed": kill_rank_and_server,
    "agent killed": lambda _: kill(agent()),
    "store killed": lambda _: kill(store()),
    "ssh server's session killed": lambda _: kill(ssh_session()),
}
