"""One replica of a shard: its partitions, their migration and their copies on backups.

    primary ── ReplicateUpdate ──> backup       A worker gets an answer when every backup has the
       ^────── Acknowledged ─────────┘          update too. A backup that takes over has lost
                                                nothing of which a worker was informed. `AckTracker`
                                                keeps the answers until then.

    shard a ── PartitionCopy ──> shard b    While a partition is in transit, nobody answers
                                                requests for it. Workers resend their pending
                                                requests to the new owner.

`Shard` in `shard.py` adds the requests of workers. Like it, this class has no sockets, no threads
and no wall clock: methods take messages and return messages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor

from shoal.parameter_server.events import (
    Acknowledged,
    InstallSnapshot,
    InSync,
    NotOwner,
    Outgoing,
    PartitionCopy,
    ProtocolViolation,
    ReplicateUpdate,
    TransferDone,
)
from shoal.parameter_server.node.partition_state import (
    GradientQuery,
    GradientSum,
    PartitionState,
    Push,
    cloned,
)
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition


class DeferredReplies(NamedTuple):
    """Answers that wait for acknowledgements up to `clock`."""

    clock: int
    answers: list[Outgoing]


@dataclass
class _Snapshots:
    """Snapshots of one partition to one backup.

    Attributes:
        needed: the number of the first since the partition came; 0 for none.
    """

    sent: int = 0
    acked: int = 0
    needed: int = 0

    @property
    def is_awaited(self) -> bool:
        return self.acked < self.needed


class AckTracker:
    """Acknowledgements of one shard's backups.

    Attributes:
        clocks: backup -> partition -> how many of its updates the backup is known to have; -1
            before its first acknowledgement.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, dict[int, int]] = {}
        self._snapshots: dict[int, defaultdict[int, _Snapshots]] = {}
        """Backup -> partition -> snapshots, also those of a partition that has left."""
        self._deferred: dict[int, deque[DeferredReplies]] = {}

    def expect(self, backup: int, clocks: Mapping[int, int]) -> None:
        """Wait for a backup from now on; it has `clocks` updates of each partition."""
        self.clocks[backup] = dict(clocks)
        self._snapshots[backup] = defaultdict(_Snapshots)

    def remove(self, backup: int) -> None:
        """Stop waiting for a backup. Call `release` for each partition afterwards."""
        self.clocks.pop(backup, None)
        self._snapshots.pop(backup, None)

    def reset(self, partition: int) -> None:
        """Drop the answers that wait: the partition is at another step now."""
        self._deferred[partition] = deque()

    def forget(self, partition: int) -> None:
        """Remove a partition that has migrated to another shard."""
        del self._deferred[partition]
        for backup, clocks in self.clocks.items():
            clocks.pop(partition, None)
            self._snapshots[backup][partition].needed = 0

    def cap_clock(self, partition: int, clock: int) -> None:
        """Record that no backup has more than `clock` updates of a partition."""
        for clocks in self.clocks.values():
            clocks[partition] = clock

    def expect_snapshot(self, backup: int, partition: int) -> None:
        """Record that a snapshot of the partition is on its way to the backup."""
        snapshots = self._snapshots[backup][partition]
        snapshots.sent += 1
        snapshots.needed = snapshots.needed or snapshots.sent

    def on_ack(self, backup: int, partition: int, clock: int, filled: bool) -> list[Outgoing]:
        """Record that a backup has all updates of a partition before `clock`.

        Before the backup has a snapshot of the partition that is here now, nothing is recorded: it
        answers for one that had left and that it holds no more.

        Args:
            filled: it has acknowledged a snapshot.

        Returns:
            Answers that may be sent now, and `InSync` after the backup's last snapshot.
        """
        snapshots = self._snapshots[backup][partition]
        snapshots.acked += filled
        out: list[Outgoing] = []
        if partition in self._deferred and not snapshots.is_awaited:
            self.clocks[backup][partition] = max(clock, self.clocks[backup].get(partition, 0))
            out += self.release(partition)
        if filled and not any(each.is_awaited for each in self._snapshots[backup].values()):
            out.append(InSync(backup))
        return out

    def defer(self, partition: int, clock: int, answers: list[Outgoing]) -> list[Outgoing]:
        """Keep answers back before all backups have a partition's updates before `clock`.

        Returns:
            Answers that may be sent now: these too, where no backup is missing.
        """
        if answers:
            self._deferred[partition].append(DeferredReplies(clock, answers))
        return self.release(partition)

    def release(self, partition: int) -> list[Outgoing]:
        """Return, once, the answers of a partition that all backups allow, in their order."""
        safe = min((clocks.get(partition, 0) for clocks in self.clocks.values()), default=inf)
        released: list[Outgoing] = []
        deferred = self._deferred[partition]
        while deferred and deferred[0].clock <= safe:
            released += deferred.popleft().answers
        return released


class ShardReplica:
    """The partitions that one server holds, as primary or as backup of a shard.

    Args:
        parts: all partitions of the model.
        recipe: the optimizer that steps them.
        workers: ids of the workers that push.
        owned: numbers of the partitions that this shard owns at the beginning; all by default.
        memory: returns the memory for a partition's values; None lets torch allocate it.

    Attributes:
        parts: number -> partition, of all of the model.
        held: number -> state of each partition that is here, owned or still to be transferred.
        owned: numbers of the partitions that this shard answers for, once they are held and unless
            they are leaving.
        leaving: numbers of the partitions that migrate to another shard.
        arriving: numbers of the partitions that migrate to this shard -> the placement version in
            which each migration started. A transfer with another version is out of date.
        done: number -> worker -> steps of that worker that the partition includes.
        sums: number -> sum of the gradients of the current synchronous step.
        pushed: (worker, number) -> push that waits for its worker's step request, where steps are
            asynchronous.
        readers: number -> worker -> clock of a read that waits for slower workers.
        queries: gradient queries that wait for the sum.
        changed: number -> (clock, blocks that the step to that clock has changed).
        backups: clocks that backups have acknowledged, and the answers that wait for them.
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        recipe: OptimizerSpec,
        workers: Iterable[int],
        owned: Iterable[int] | None,
        memory: Callable[[Partition], Tensor | None],
    ) -> None:
        self.parts = {part.number: part for part in parts}
        self.recipe = recipe
        self.workers = sorted(workers)
        self._memory = memory
        self.owned = set(self.parts) if owned is None else set(owned)
        self.leaving: set[int] = set()
        self.arriving: Mapping[int, int] = {}
        self.held: dict[int, PartitionState] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.sums: dict[int, GradientSum] = {}
        self.pushed: dict[tuple[int, int], Push] = {}
        self.readers: dict[int, dict[int, int]] = {}
        self.queries: list[GradientQuery] = []
        self.changed: dict[int, tuple[int, Tensor]] = {}
        self.backups = AckTracker()

    # Partitions that are here

    def require_partition(self, partition: int) -> PartitionState:
        """Return the state of a partition that this shard answers for now.

        Raises:
            ProtocolViolation: the model has no such partition.
            NotOwner: another shard owns it, or it is in transit.
        """
        self._check_number(partition)
        if partition not in self.held or partition not in self.owned or partition in self.leaving:
            raise NotOwner(partition)
        return self.held[partition]

    def _allocate(self, partition: int) -> PartitionState:
        """Return the state of a partition, and create it where there is none yet."""
        self._check_number(partition)
        if partition not in self.held:
            layout = self.parts[partition]
            self.held[partition] = PartitionState(layout, self.recipe, self._memory(layout))
        return self.held[partition]

    def _check_number(self, partition: int) -> None:
        if partition not in self.parts:
            raise ProtocolViolation(f"part {partition} is none of {len(self.parts)}")

    def _reset_requests(self, partition: int, done: Mapping[int, int]) -> None:
        """Drop all pending requests for a partition: its values are of another step now."""
        self.done[partition] = dict(done)
        self.sums[partition] = GradientSum()
        self.backups.reset(partition)
        self.readers[partition] = {}
        self.changed.pop(partition, None)
        self.pushed = {key: push for key, push in self.pushed.items() if key[1] != partition}
        self.queries = [query for query in self.queries if query.part != partition]

    def _copied(self, partition: int) -> PartitionCopy:
        """Return a copy for a message, which must not change later."""
        state = self.held[partition]
        states = [cloned(segment_state) for segment_state in state.state()]
        done = dict(self.done[partition])
        return PartitionCopy(partition, state.clock, state.values.clone(), states, done)

    def _install(self, copy: PartitionCopy) -> None:
        """Replace a partition by a copy of it."""
        state = self._allocate(copy.part)
        state.load(copy.values, list(copy.state), copy.clock)
        self._reset_requests(copy.part, copy.steps_by_worker)

    def _count_steps(self, partition: int, worker: int, step: int) -> None:
        """Record that a partition includes a step: of one worker, or of all where it is -1."""
        done = self.done[partition]
        for worker_id in self.workers if worker < 0 else [worker]:
            done[worker_id] = step + 1

    # Migration

    def set_ownership(
        self, owned: set[int], leaving: set[int], arriving: Mapping[int, int]
    ) -> dict[int, dict[int, int]]:
        """Apply a placement: answer for `owned` without `leaving`, as soon as they are held.

        Returns:
            Partitions that were removed from this shard -> steps of each worker that they included.
        """
        self.owned = owned
        self.leaving = leaving
        self.arriving = arriving
        removed = {
            partition: self.done[partition]
            for partition in self.held
            if partition not in owned and partition not in arriving
        }
        for partition in removed:
            self._reset_requests(partition, {})
            self.backups.forget(partition)
            for table in (self.held, self.done, self.sums, self.readers):
                del table[partition]
        return removed

    def export_partition(self, partition: int) -> PartitionCopy | None:
        """Return a copy of a leaving partition; None if it is not here.

        The partition cannot change any more, so a repeated transfer has the same content."""
        if partition not in self.leaving or partition not in self.held:
            return None
        self._reset_requests(partition, self.done[partition])
        return self._copied(partition)

    def import_partition(
        self, transfer: PartitionCopy, start_version: int, source: int
    ) -> list[Outgoing]:
        """Load a partition that arrives from another shard.

        The coordinator is informed when every backup has the partition too. This shard answers for
        it after `set_ownership` says so.

        Args:
            start_version: of the migration that the transfer belongs to.
            source: the server that sent it.
        """
        if self.arriving.get(transfer.part) != start_version:
            return []
        self._install(transfer)
        snapshots = self._fill_backups(transfer.part)
        transfer_done = TransferDone(transfer.part, start_version, source)
        return [*snapshots, *self.backups.defer(transfer.part, transfer.clock, [transfer_done])]

    # Replication, as the primary

    def add_backup(self, backup: int, in_sync: bool = False) -> list[Outgoing]:
        """Send a snapshot of every partition to a replica, and every update from now on.

        Args:
            in_sync: the replica may take over at any moment, so no worker gets an answer before
                the replica has acknowledged its snapshots.
        """
        clocks = {
            partition: -1 if in_sync else state.clock for partition, state in self.held.items()
        }
        self.backups.expect(backup, clocks)
        snapshots = [self._snapshot_for(backup, partition) for partition in self.held]
        return [*snapshots, *([] if snapshots else [InSync(backup)])]

    def await_backup(self, backup: int) -> None:
        """Hold all answers back before this replica has acknowledged its partitions."""
        self.backups.expect(backup, dict.fromkeys(self.held, -1))

    def remove_backup(self, backup: int) -> list[Outgoing]:
        """Stop waiting for a replica that has gone. Return the answers that waited for it alone."""
        self.backups.remove(backup)
        return [out for partition in self.held for out in self.backups.release(partition)]

    def on_ack(
        self, backup: int, partition: int, clock: int, filled: bool = False
    ) -> list[Outgoing]:
        """Handle a backup's acknowledgement of all updates of a partition before `clock`.

        Args:
            filled: the backup has acknowledged a snapshot, not an update.
        """
        if backup not in self.backups.clocks:
            return []
        return self.backups.on_ack(backup, partition, clock, filled)

    def _fill_backups(self, partition: int) -> list[Outgoing]:
        """Send the partition's new content to all backups, which have nothing of it yet."""
        self.backups.cap_clock(partition, self.held[partition].clock - 1)
        return [self._snapshot_for(backup, partition) for backup in self.backups.clocks]

    def _snapshot_for(self, backup: int, partition: int) -> InstallSnapshot:
        """Make a snapshot. Its acknowledgement counts, and none of an older update does."""
        self.backups.expect_snapshot(backup, partition)
        return InstallSnapshot(backup, self._copied(partition))

    # Replication, as a backup

    def install_snapshot(self, content: PartitionCopy) -> list[Outgoing]:
        """Replace a partition by the primary's snapshot of it."""
        self._install(content)
        return [Acknowledged(content.part, content.clock)]

    def apply_replicated(self, message: ReplicateUpdate) -> list[Outgoing]:
        """Apply the update that the primary has applied, exactly once.

        Raises:
            ProtocolViolation: an update before this one is missing.
        """
        state = self.held.get(message.part)
        if state is None:  # it has migrated in the meantime
            return [Acknowledged(message.part, message.clock + 1)]
        if message.clock > state.clock:
            raise ProtocolViolation(
                f"update {message.clock} of part {message.part} came before update {state.clock}"
            )
        if message.clock == state.clock:
            update = message.update
            state.apply(update.gradient, update.grad_mask, message.settings)
            self._count_steps(message.part, update.worker, update.step)
        return [Acknowledged(message.part, state.clock)]
