"""The process group of backend "shoal". Each call uses shared memory if it can, else Gloo."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.platform.cgroups import usable_cores
from shoal.platform.torch_private.c10d import add_backend, make_gloo, timeout_of
from shoal.shm_backend.call import MAX_RANKS
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.collective_ops import CollectiveOps
from shoal.shm_backend.inter_host import InterHost
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.native import MAX_RANKS as MAX_NATIVE_RANKS
from shoal.shm_backend.native import NativeCalls
from shoal.shm_backend.phase_board import PhaseBoard
from shoal.shm_backend.rendezvous import Topology, rendezvous
from shoal.shm_backend.segment import AttachedSegment, SharedSegment
from shoal.shm_backend.waiter import SPIN_S, Waiter
from shoal.trace.recorder import Recorder
from shoal.watchdog.progress_writer import own_progress

logger = logging.getLogger("shoal.comm")
GLOO = dist.ProcessGroup.BackendType.GLOO


class ShoalGroup(CollectiveOps):
    """A process group on shared memory, with Gloo as its second backend.

    Args:
        store: of this group alone.
        rank, size: this rank in the group, and the number of ranks.
        timeout: of each wait for other ranks.
        ranks: the global ranks of the group, for messages; empty for all ranks of the world.
        label: name of the group in traces, the same on all its ranks.
        shared_memory: False to leave all calls to Gloo.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        label: str = "",
        shared_memory: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self.recorder: Recorder | None = None
        self._label = label
        gloo = make_gloo(PrefixStore("gloo", store), rank, size, timeout)
        add_backend(self, torch.device("cpu"), GLOO, gloo)
        # Without the group in it: the waiter would keep the group alive.
        self._timeout = partial(timeout_of, gloo)
        self._timeout_s = lambda: timeout_of(gloo).total_seconds()
        self._ranks = list(ranks) or list(range(size))
        self._signatures = {}
        self._gloo_progress = None
        self._num_gloo_calls = 0
        self._queue: CallQueue | None = None
        self._peers: PeerLiveness | None = None
        self._inter_host: InterHost | None = None
        self._native_calls: NativeCalls | None = None
        self._host_ranks: Sequence[int] = ()
        if shared_memory:
            topology = rendezvous(PrefixStore("meeting", store), rank, size)
            self._choose_transport(store, topology)

    def _choose_transport(self, store: Store, topology: Topology) -> None:
        """Use shared memory for collectives if the ranks of each host can open each other's."""
        host_ranks = next(ranks for ranks in topology.hosts if self.rank() in ranks)
        if topology.memory is not None:
            self._host_ranks = host_ranks
            self._peers = PeerLiveness(
                {host_ranks.index(rank): pid for rank, pid in topology.pids.items()}
            )
        if reason := _unsupported_reason(topology, self.size()):
            # A reason of the topology is a defect of the machine. The others are by design.
            level = logging.WARNING if topology.reason else logging.DEBUG
            logger.log(level, "%s: Gloo does all: %s", self, reason)
            return
        assert topology.memory is not None
        assert self._peers is not None
        self._board = self._join_board(host_ranks, topology.memory, topology.attached)
        # With more ranks than cores, spinning would take the core from the rank that is late.
        spin_s = SPIN_S if len(host_ranks) <= usable_cores() else 0.0
        if topology.compiled and 1 < len(host_ranks) <= MAX_NATIVE_RANKS:
            self._native_calls = NativeCalls(self._board, yields=spin_s == 0)
        if len(topology.hosts) > 1:
            self._inter_host = InterHost(store, topology.hosts, self.rank(), self._timeout)
        waiter = Waiter(self._board, self._peers, self._timeout_s, spin_s)
        self._queue = CallQueue(waiter, f"{self._ranks}")

    def _join_board(
        self,
        host_ranks: Sequence[int],
        memory: SharedSegment,
        attached: Mapping[int, AttachedSegment],
    ) -> PhaseBoard:
        """Return this rank's phase board, whose ranks are indices into `host_ranks`."""
        peers = {host_ranks.index(rank): segment for rank, segment in attached.items()}
        names = [self._ranks[rank] for rank in host_ranks]
        # Ranks of other hosts make the same calls, so the launcher counts those of all.
        progress = own_progress().join_group(f"{self._label} on {self._ranks}", self._ranks)
        return PhaseBoard(host_ranks.index(self.rank()), memory, peers, names, progress)

    def __repr__(self) -> str:
        return f"group of ranks {self._ranks}"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shoal"

    @property
    def sums_in_order(self) -> bool:
        """True if the order of a sum does not depend on the position in the tensor.

        Values are added in the order of ranks on a host, then in the order of hosts.
        """
        return self._queue is not None

    def shutdown(self) -> None:
        """Finish the calls that have been made, and leave the group."""
        if self._queue is not None and self._queue.close():
            # Later calls are refused, so nothing reads this memory any more.
            self._native_calls = None
            self._board.close()
        if self._peers is not None:
            self._peers.close()
        super().shutdown()


def _unsupported_reason(topology: Topology, size: int) -> str:
    """Return why Gloo must make all calls; an empty string if shared memory can be used."""
    if topology.reason:
        return topology.reason
    if size > MAX_RANKS:
        return f"{size} ranks"
    # Between hosts each rank works with the rank of the same index on the other hosts.
    uneven = len({len(ranks) for ranks in topology.hosts}) > 1
    if len(topology.hosts) > 1 and (uneven or len(topology.hosts) == size):
        counts = ", ".join(str(len(ranks)) for ranks in topology.hosts)
        return f"{counts} ranks on {len(topology.hosts)} hosts"
    return ""
