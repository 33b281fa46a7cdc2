"""The kinds of fault, the strategies and the places of the report, and what is promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PLACES = ("one host", "three hosts")
LEASE = "lease_s=0.5"
STRATEGIES = {
    "ddp": "ddp",
    "zero3": "zero3",
    "tensor": "tensor=2",
    "pipeline": "pipeline=2",
    "tensor x pipeline x zero1": "tensor=2,pipeline=2,zero1",
    "server": f"server=2,{LEASE}",
    "server, 2 replicas": f"server=2,replicas=2,{LEASE}",
    "stale server": f"server=2,staleness=2,{LEASE}",
}
RANKS = {"tensor": (2, 2, 2), "tensor x pipeline x zero1": (4, 2, 2)}
"""The ranks of each of three hosts, where (2, 1, 1) would tear groups of tensor ranks apart."""
SERVERS = tuple(name for name, line in STRATEGIES.items() if line.startswith("server"))

RESTART, IN_PLACE = "restart", "goes on"
AGAIN = "the same command resumes"
REPLICAS = "restart; with replicas goes on"


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        name: in RANK_FAULTS or OUTSIDE_FAULTS.
        promise: what follows.
        absent: why there is none of it, by place.
        needs_servers: it concerns their processes.
        rank: that meets it; None for any.
    """

    name: str
    promise: str
    absent: tuple[str, str] = ("", "")
    needs_servers: bool = False
    rank: int | None = None


def _hosts(name: str, promise: str, rank: int | None = None) -> Kind:
    return Kind(name, promise, ("several hosts only", ""), rank=rank)


def _server(name: str, promise: str) -> Kind:
    # Rank 0 starts the helpers, so only there their processes are known.
    return Kind(name, promise, needs_servers=True, rank=0)


KINDS = (
    Kind("rank killed", RESTART),
    Kind("rank killed, and again after the restart", f"{RESTART}, twice"),
    Kind("all ranks of a host killed", RESTART),
    Kind("rank crashes (SIGSEGV)", RESTART),
    Kind("rank stopped", RESTART),
    Kind("rank stopped for 1 s", IN_PLACE),
    Kind("rank sleeps in a step", RESTART),
    Kind("rank in C, interpreter locked", RESTART),
    Kind("data blocks", RESTART),
    Kind("loader worker killed", RESTART),
    Kind("loader worker stopped", RESTART),
    Kind("slow", "named; goes on"),
    Kind("fork server killed", RESTART),
    Kind("rank killed in a save", RESTART),
    Kind("newest checkpoint truncated, rank killed", f"{RESTART} from the one before"),
    Kind("bit of the newest checkpoint flipped, rank killed", f"{RESTART} from the one before"),
    Kind("newest checkpoint gone, rank killed", f"{RESTART} from the one before"),
    Kind("writes of a rank fail for 1 s", IN_PLACE),
    Kind("/dev/shm emptied", IN_PLACE),
    Kind("command killed, given again", AGAIN),
    Kind("SIGTERM to the command, given again", AGAIN),
    Kind("Ctrl-C, given again", AGAIN),
    Kind("command stopped for 1 s", IN_PLACE),
    Kind("command stopped for 5 s", IN_PLACE, ("", "see 1 s and 12 s")),
    _hosts("command stopped for 12 s", RESTART),
    Kind("everything stopped for 5 s", IN_PLACE),
    _hosts("agent killed", RESTART),
    _hosts("store killed", RESTART, rank=0),
    _hosts("ssh client killed", RESTART),
    _hosts("ssh server's session killed", RESTART),
    _hosts("host cut off for 1 s", IN_PLACE),
    _hosts("host cut off for 12 s", RESTART),
    _hosts("first host cut off for 12 s", RESTART),
    _hosts("two hosts cut off for 12 s", RESTART),
    _hosts("host unheard for 12 s", RESTART),
    _hosts("command's machine cut off for 1 s", IN_PLACE),
    _hosts("command's machine cut off for 12 s", RESTART),
    _hosts("link of 2 Mbit/s for 5 s", IN_PLACE),
    _hosts("host starts again", RESTART),
    _hosts("first host starts again", RESTART),
    _hosts("all hosts start again", RESTART),
    _server("spawner killed", RESTART),
    _server("spawner and coordinator killed", RESTART),
    _server("coordinator killed", IN_PLACE),
    _server("coordinator stopped", IN_PLACE),
    _server("server killed", REPLICAS),
    _server("server stopped", REPLICAS),
    _server("server stopped for 1 s", REPLICAS),
    _server("server and coordinator killed", REPLICAS),
    _server("all servers of a shard killed", RESTART),
    _server("rank and server killed", RESTART),
)


@dataclass(frozen=True)
class Cell:
    """A kind of fault under a strategy at a place."""

    place: str
    kind: Kind
    strategy: str

    @property
    def fault(self) -> str:
        return self.kind.name

    @property
    def name(self) -> str:
        """Return its name in the record, which has the trials of all strategies below it."""
        return f"{self.place}: {self.fault}"

    @property
    def line(self) -> str:
        return STRATEGIES[self.strategy]

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of ranks of each host."""
        if self.place == PLACES[0]:
            return (4,) if self.line.endswith("zero1") else (2,)
        return RANKS.get(self.strategy, (2, 1, 1))

    @property
    def ranks(self) -> int:
        return sum(self.counts)

    @property
    def is_exact(self) -> bool:
        """Return False where the bits differ from run to run also without a fault."""
        return self.strategy != "stale server"

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings besides those of every run."""
        return {"data.workers": 1} if "loader" in self.fault else {}

    @property
    def absent(self) -> str:
        """Return why there is no such trial; empty where there is."""
        if self.kind.needs_servers and self.strategy not in SERVERS:
            return "no servers"
        if self.fault == "slow" and "pipeline" in self.line:
            return "one rank a stage"
        return self.kind.absent[PLACES.index(self.place)]


def cells() -> Iterator[Cell]:
    """Return all cells of which there are trials."""
    for place in PLACES:
        for kind in KINDS:
            for strategy in STRATEGIES:
                cell = Cell(place, kind, strategy)
                if not cell.absent:
                    yield cell
