"""Seconds of messages: measured where there is a measurement, else by the formula of the algorithm.

n ranks, M bytes of the whole tensor, B bytes/s of the narrowest link one way, a its latency and
what a message costs whatever its size, where it was measured:

      all_reduce       2 (n-1) a + 2 (n-1)/n M/B    ring; the sum in rank order over Gloo too
      all_gather         (n-1) a +   (n-1)/n M/B    ring
      reduce_scatter     (n-1) a +   (n-1)/n M/B    ring
      send                     a +           M/B
      push, pull      a + max(M/w, m M / (n B))     m workers of w, n servers (`server_count`)

Sources: Thakur et al., IJHPCA 2005; Patarasuk and Yuan, JPDC 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.costs.cluster import Cluster, Link
from shoal.costs.machine import Machine
from shoal.costs.server_count import one_way
from shoal.costs.step_cost import SentMessage, StepCost

STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@dataclass(frozen=True)
class Network:
    """The links between the ranks of a step, as one rank sees them."""

    machine: Machine
    cluster: Cluster

    def seconds(self, message: SentMessage, step: StepCost) -> float:
        """Return how long a message takes if nothing else uses its link."""
        if message.kind in ("push", "pull"):
            return message.share * self._server_s(message, step)
        ranks = 2 if message.kind == "send" else step.axis_size(message.axis)
        if ranks < 2 or not message.size_bytes:
            return 0.0
        stride = self._stride(message.axis, step)
        if ranks * stride <= self.cluster.ranks_per_host:
            curve = self.machine.collective("shoal", message.kind, ranks)
            if curve is not None:
                return message.share * curve.seconds_at(message.size_bytes)
        link = self.cluster.link_of(ranks, stride)
        if (start := self.machine.collective("gloo", message.kind, 2)) is not None:
            hop_s = start.points[0].value / STEPS.get(message.kind, 1)
            link = link._replace(latency_s=link.latency_s + hop_s)
        return message.share * ring_s(message.kind, message.size_bytes, ranks, link)

    def server_crowding(self, step: StepCost) -> float:
        """Return how much servers and ranks slow each other down where they share cores."""
        if not step.servers or len(self.cluster.hosts) > 1 or self.cluster.server_hosts:
            return 1.0
        ranks = self.cluster.ranks_per_host
        return self.machine.crowding(ranks + step.servers) / self.machine.crowding(ranks)

    def _stride(self, axis: str, step: StepCost) -> int:
        layout = step.layout
        shard = step.shard_ranks or layout.data
        return {
            "tensor": 1,
            "data": layout.tensor,
            "shard": layout.tensor,
            "replicate": layout.tensor * shard,
            "pipeline": layout.tensor * layout.data,
        }.get(axis, 1)

    def _server_s(self, message: SentMessage, step: StepCost) -> float:
        """Return the seconds of a partition: every server takes its share from all workers."""
        workers, servers = step.layout.data, max(step.servers, 1)
        worker, server = (
            min(self.machine.server_rate, rate) for rate in self.cluster.server_rates(servers)
        )
        moved_s = one_way(message.size_bytes, worker, workers, servers, server)
        return (moved_s + self.machine.server_part_s) * self.server_crowding(step)


def ring_s(kind: str, size_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a collective in a ring, or of a send."""
    if kind == "send":
        return link.latency_s + size_bytes / link.bandwidth
    steps = STEPS[kind]
    hops = ranks - 1
    return steps * hops * (link.latency_s + size_bytes / ranks / link.bandwidth)
