"""Worlds that a launched script makes at an address of its own, or in processes of its own.

    init_process_group(init_method="tcp://127.0.0.1:29500", rank=..., world_size=...)
    os.environ["MASTER_PORT"] = "12355"; init_process_group(...)
    torch.multiprocessing.spawn(train, nprocs=2)

Under a launcher torch makes all ranks clients of a store that exists already (see
TORCHELASTIC_USE_AGENT_STORE), so nobody would serve these addresses, and the ranks would wait for
half an hour. Here such ranks meet in the launcher's store, below the address as a prefix. No port
is taken, and several jobs whose scripts name the same port never meet.

Where a script starts processes itself and each rank of the launcher does so, several processes may
claim one rank. They are refused.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from shoal.errors import UsageError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import Store

USES_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SCHEMES = ("tcp", "env")

Handler = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class LaunchedRank:
    """The rank as the launcher started it, and the launcher's store.

    Args:
        rank: its rank.
        world: the number of ranks that the launcher started.
        host: address of the store.
        port: port of the store.
        pid: of the rank's own process; a child of it has another one.
    """

    rank: int
    world: int
    host: str
    port: int
    pid: int


@dataclass(frozen=True)
class _AskedWorld:
    """A world that a script asks for: where, with which rank, among how many."""

    scheme: str
    host: str
    port: int
    rank: int
    size: int


def meet_in_store_of_launcher(environment: Mapping[str, str]) -> None:
    """Let ranks of this process, and of those that it starts, meet wherever the script says.

    Call it once, in a rank, after torch was imported. Without torch's store of the launcher it does
    nothing.

    Args:
        environment: the rank's variables.
    """
    if environment.get(USES_STORE) != "True":
        return
    rank = LaunchedRank(
        int(environment["RANK"]),
        int(environment["WORLD_SIZE"]),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        os.getpid(),
    )
    _replace_handlers(rank)
    _follow_children(rank)


def _replace_handlers(rank: LaunchedRank) -> None:
    from torch.distributed.constants import default_pg_timeout

    from shoal.platform.torch_private.url_rendezvous import replace_handler

    def replaced(original: Handler) -> Handler:
        def meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
            world = _world(url)
            if world is None or not _is_own(world, rank):
                return original(url, **options)
            if _is_elsewhere(world, rank):
                return _without_store(original, url, options)
            return _in_store(world, rank, options.get("timeout", default_pg_timeout))

        return meet

    for scheme in SCHEMES:
        replace_handler(scheme, replaced)


def _world(url: str) -> _AskedWorld | None:
    """Return the world of a URL; None where it lacks something, which torch will tell."""
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query))
    try:
        if parts.scheme == "env":
            rank = asked.get("rank") or os.environ["RANK"]
            size = asked.get("world_size") or os.environ["WORLD_SIZE"]
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        else:
            rank, size = asked["rank"], asked["world_size"]
            host, port = parts.hostname or "", parts.port or 0
        return _AskedWorld(parts.scheme, host, port, int(rank), int(size))
    except (KeyError, ValueError):
        return None


def _is_own(world: _AskedWorld, rank: LaunchedRank) -> bool:
    """Return True for a world that is not simply the launcher's, met by the rank's own process."""
    is_at_store = world.scheme == "env" and (world.host, world.port) == (rank.host, rank.port)
    return os.environ.get(USES_STORE) == "True" and not (is_at_store and os.getpid() == rank.pid)


def _is_elsewhere(world: _AskedWorld, rank: LaunchedRank) -> bool:
    """Return True where others than this launcher's ranks must take part, at the address itself.

    The children of all ranks may be more than the ranks; they have an address of this machine.
    """
    is_child = os.getpid() != rank.pid
    return world.size > rank.world and not (is_child and _is_loopback(world.host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_store(original: Handler, url: str, options: dict[str, Any]) -> Iterator[Any]:
    """Meet as without a launcher: rank 0 serves a store at the address."""
    used = os.environ.pop(USES_STORE)
    try:
        yield next(meeting := original(url, **options))
    finally:
        os.environ[USES_STORE] = used
    yield from meeting


def _in_store(
    world: _AskedWorld, rank: LaunchedRank, timeout: timedelta
) -> Iterator[tuple[Store, int, int]]:
    """Meet in the launcher's store. Every rank of the world calls it equally often."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(rank.host, rank.port, None, is_master=False, timeout=timeout)
    place = f"{world.host}:{world.port}/{world.size}"
    if world.size == 1:  # every rank of the launcher may have such a world
        place += f"/{rank.rank}"
    seat = f"script/{place}/{world.rank}"
    owner = store.compare_set(f"{seat}/owner", "", str(rank.rank)).decode()
    if int(owner) != rank.rank:
        raise UsageError(
            f"Rank {world.rank} of a world of {world.size} at {world.host}:{world.port} was made "
            f"twice, by rank {owner} and by rank {rank.rank} of the launcher: the script starts "
            f"processes of its own, and the launcher has started the script {rank.world} times. "
            "Start it once, with `python` or `shoal launch -n 1`; or take rank and world size from "
            "RANK and WORLD_SIZE, and start no processes."
        )
    meeting = store.add(f"{seat}/meetings", 1)
    yield PrefixStore(f"script/{place}/meeting {meeting}", store), world.rank, world.size
    raise RuntimeError("this world cannot meet a second time in one call")


def _follow_children(rank: LaunchedRank) -> None:
    """Let processes that start as new interpreters do as this one does.

    A forked one has its memory.
    """
    start = BaseProcess.start

    @wraps(start)
    def start_in_script(process: Any) -> None:
        target = getattr(process, "_target", None)
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        if method != "fork" and target is not None and not _is_loader_worker(target):
            process._target = _InChild(rank, target)
        start(process)

    processes: Any = BaseProcess
    processes.start = start_in_script


def _is_loader_worker(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith("torch.utils.data")


@dataclass(frozen=True)
class _InChild:
    """The target of a process that a rank starts."""

    rank: LaunchedRank
    target: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if "torch" in sys.modules:
            _replace_handlers(self.rank)
            _follow_children(self.rank)
        return self.target(*arguments, **options)
