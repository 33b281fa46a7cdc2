"""The process group: what torch.distributed calls. Everything is either a call on shared memory
or Gloo's affair.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from shoal.platform.torch_private.c10d import Options, add_backend
from shoal.shm_backend import collectives
from shoal.shm_backend.call import MAX_RANKS, CallSignature
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.inter_host import InterHost
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.messages import Messages
from shoal.shm_backend.movement_ops import MovementOps
from shoal.shm_backend.native import MAX_RANKS as MAX_NATIVE_RANKS
from shoal.shm_backend.native import NativeCalls
from shoal.shm_backend.phase_board import PhaseBoard
from shoal.shm_backend.reduction_ops import Reductions
from shoal.shm_backend.rendezvous import Topology, rendezvous
from shoal.shm_backend.segment import AttachedSegment, SharedSegment
from shoal.shm_backend.waiter import SPIN_S, Waiter
from shoal.trace.recorder import Recorder

logger = logging.getLogger("shoal.comm")
GLOO = dist.ProcessGroup.BackendType.GLOO


class ShoalGroup(Reductions, MovementOps, Messages):
    """A group of ranks that meet in shared memory, with Gloo beside it. What is not done here, the
    base class hands on.

    Args:
        store: of this group alone.
        ranks: the global ranks of the group, for messages; empty for all there are.
        timeout: for each meeting in a call.
        label: what all its ranks call the group, in traces.
        meets: ranks use shared memory; without it Gloo does all.

    Attributes:
        recorder: is told of every call while a trace is taken.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        label: str = "",
        meets: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self.recorder: Recorder | None = None
        self._label = label
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
        add_backend(self, torch.device("cpu"), GLOO, gloo)
        self._ranks = list(ranks) or list(range(size))
        self._signatures, self._fast_paths = {}, {}
        self._queue: CallQueue | None = None
        self._peers: PeerLiveness | None = None
        self._inter_host: InterHost | None = None
        self._native: NativeCalls | None = None
        self._timeout_s = timeout.total_seconds()
        self._here: Sequence[int] = ()
        if meets:
            self._choose_transport(
                store, rendezvous(PrefixStore("meeting", store), rank, size), timeout
            )

    def _choose_transport(self, store: Store, meeting: Topology, timeout: timedelta) -> None:
        """Use shared memory for collectives where the ranks of each host can reach each other's."""
        here = next(ranks for ranks in meeting.hosts if self.rank() in ranks)
        if meeting.memory is not None:
            self._here = here
            self._peers = PeerLiveness(
                {here.index(rank): pid for rank, pid in meeting.pids.items()}
            )
        if reason := _unsupported_reason(meeting, self.size()):
            level = logging.WARNING if meeting.reason else logging.DEBUG
            logger.log(level, "%s: Gloo does all: %s", self, reason)
            return
        assert meeting.memory is not None
        assert self._peers is not None
        self._board = self._join_board(here, meeting.memory, meeting.reached)
        spin_s = SPIN_S if len(here) <= len(os.sched_getaffinity(0)) else 0.0
        if meeting.compiled and len(here) <= MAX_NATIVE_RANKS:
            self._native = NativeCalls(self._board, yields=spin_s == 0)
        if len(meeting.hosts) > 1:
            self._inter_host = InterHost(store, meeting.hosts, self.rank(), timeout)
        waiting = Waiter(self._board, self._peers, timeout.total_seconds(), spin_s)
        self._queue = CallQueue(waiting, f"{self._ranks}")

    def _join_board(
        self, here: Sequence[int], memory: SharedSegment, reached: Mapping[int, AttachedSegment]
    ) -> PhaseBoard:
        """Make this rank's end of its host's board, which numbers the ranks of the host."""
        others = {here.index(rank): attached for rank, attached in reached.items()}
        names = [self._ranks[rank] for rank in here]
        return PhaseBoard(here.index(self.rank()), memory, others, names)

    def __repr__(self) -> str:
        return f"group of ranks {self._ranks}"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shoal"

    @property
    def sums_in_order(self) -> bool:
        """Whether numbers are added in one order wherever in a tensor they lie: that of ranks,
        then that of hosts.
        """
        return self._queue is not None

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks meet in shared memory."""
        return self._queue is not None and self._inter_host is None

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or Options.BarrierOptions()
        if not self.on_one_host:
            return self._fall_back_to_gloo("barrier", (), opts)
        call = self._signatures.setdefault(
            (), (CallSignature("barrier"), CallSignature("barrier").encoded)
        )
        return self._run(call, lambda: collectives.barrier(self._board), (), (), (), opts)

    def shutdown(self) -> None:
        """Finish what was begun, and leave."""
        if self._queue is not None:
            self._queue.close()
        if self._peers is not None:
            self._peers.close()
        super().shutdown()


def _unsupported_reason(meeting: Topology, size: int) -> str:
    """Why Gloo does everything; empty where it need not."""
    if meeting.reason:
        return meeting.reason
    if size == 1 or size > MAX_RANKS:
        return f"{size} ranks"
    if len({len(ranks) for ranks in meeting.hosts}) > 1 or len(meeting.hosts) == size:
        return f"{', '.join(str(len(ranks)) for ranks in meeting.hosts)} ranks on {len(meeting.hosts)} hosts"
    return ""
