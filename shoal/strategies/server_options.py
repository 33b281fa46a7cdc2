"""Options of parameter servers, as `options.py` has those of the other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoal.comm import compression_spec
from shoal.errors import problems_of, raise_problems
from shoal.strategies.options import StrategyOptions

MAX_SERVERS = 1024


@dataclass(frozen=True)
class ServerOptions(StrategyOptions):
    """Options of parameter servers.

    Args:
        servers: number of servers, and of the shards that they own.
        replicas: servers that hold each shard. With 2, the loss of any one server loses no state,
            and training continues.
        staleness: steps that a worker may be ahead of the slowest one. "0" is synchronous and
            exact; "async" sets no bound. If it is not 0, each push is a step of its own, with
            1/workers of the learning rate.
        compress: encoding of pushed gradients: none, bf16, fp16, topk=FRACTION or onebit. Every one
            but none is inexact.
        part_mb: maximum size of a partition, in MiB. Small models have smaller partitions: on one
            machine about one for each server, between machines about four. A server that is added
            on one machine may find none to take.
        lease_s: seconds for which a server may be silent before another one takes over.
        shared_memory: workers and servers of one machine read each other's memory, without
            messages.
        encrypt: use TLS 1.3 between machines. Without it, who can listen on the network reads
            gradients and weights and can send others.
    """

    value: ClassVar[str] = "servers"
    servers: int = 1
    replicas: int = 1
    staleness: str = "0"
    compress: str = "none"
    part_mb: float = 4.0
    lease_s: float = 2.0
    shared_memory: bool = True
    encrypt: bool = True

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        return [f"{name}={servers}" for servers in sorted({1, max(ranks // 2, 1), ranks})]

    def __post_init__(self) -> None:
        messages = []
        if self.servers <= 0:
            messages.append(f"server={self.servers}: there must be at least one server")
        if self.replicas < 1:
            messages.append(f"replicas={self.replicas}: there must be at least one of each shard")
        if max(self.servers, self.replicas) > MAX_SERVERS:
            given = f"server={self.servers},replicas={self.replicas}"
            messages.append(f"{given}: there may be up to {MAX_SERVERS:,} of each")
        if not 0 < self.lease_s < inf:
            messages.append(f"lease_s={self.lease_s}: must be greater than 0, and finite")
        is_number = self.staleness.isdecimal() and len(self.staleness) < 19
        if self.staleness != "async" and not is_number:
            messages.append(
                f"staleness={self.staleness}: a number of steps, 0 for synchronous ones, or async"
            )
        if not 0 < self.part_mb < inf:
            messages.append(f"part_mb={self.part_mb}: must be greater than 0, and finite")
        messages += problems_of(lambda: compression_spec.read(self.compress))
        raise_problems(messages)
