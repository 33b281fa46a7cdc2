"""Messages between the ranks of a host: who gets which. It moves what can be moved, and never waits.

      posted     recv(tag 7) recv(any, tag 5)          in the order in which they were asked for
      channel    [tag 5 │ a0] [tag 5 │ a1] [tag 7 │ b]   in the order in which they were sent

A send is done when its bytes are in memory that the other rank has opened: nothing is lost then if the sender ends.
The first one between two ranks is done when it has been taken.

A message goes to the first that was posted for its sender and its tag. One that nobody has asked for stays where it is,
and its sender waits, unless somebody asks for one behind it: then it is kept here, so that the other can come. A
message of another size or type than was asked for ends its channel, on both ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.comm.backend.bell import ROOM, SLICES, Bell
from shoal.comm.backend.channel import SLICE_BYTES, Channel, Head
from shoal.comm.backend.directory import Directory
from shoal.comm.backend.pending import Kept, Pending, Receiving, Sending
from shoal.errors import CollectiveFailed, PeerLost
from shoal.tensors import DTYPE_NUMBERS, DTYPES


class Line:
    """What is under way between this rank and another one.

    Attributes:
        leaving: not all sent. unread: all sent, to a rank that has not come yet. coming: whose the next slices are.
        error: why nothing is sent any more. is_read: though the other one gave up, what it had sent can be had.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.leaving: deque[Sending] = deque()
        self.unread: deque[Sending] = deque()
        self.kept: list[Kept] = []
        self.coming: Receiving | Kept | None = None
        self.error: CollectiveFailed | None = None
        self.is_read = True


class Post:
    """One rank's post office. One thread at a time.

    Args: rank: among those of the host. names: what they are called.
    """

    def __init__(self, rank: int, names: Sequence[int], directory: Directory, bell: Bell) -> None:
        self.rank, self.names = rank, list(names)
        self._directory, self._bell = directory, bell
        self._others = [other for other in range(len(names)) if other != rank]
        self.lines: dict[int, Line] = {}
        self.posted: list[Receiving] = []

    def line(self, other: int) -> Line:
        """Between this rank and another one; made when they first talk."""
        found = self.lines.get(other)
        if found is None:
            found = self.lines[other] = Line(Channel(other, self._directory, self._bell))
        return found

    def add(self, pending: Sending | Receiving) -> None:
        """Somebody sends, or asks.

        Raises: CollectiveFailed: a message between these two has failed before.
        """
        line = None if pending.other is None else self.line(pending.other)
        if isinstance(pending, Receiving):
            if not self._was_kept(pending):
                self.posted.append(pending)
                if line is not None:
                    self._pull(line)
            if line is not None and not pending.is_settled():
                self._check_new(line, pending)
        else:
            assert line is not None
            self._check_new(line, pending)
            line.leaving.append(pending)
            self._push(line)

    def wants(self) -> int:
        """The events that would let something move, though nobody waits for it."""
        room = any(line.leaving for line in self.lines.values())
        slices = self.posted or any(line.coming is not None for line in self.lines.values())
        return (ROOM if room else 0) | (SLICES if slices else 0)

    def awaits(self) -> int:
        """The events that whoever waits is to be woken for."""
        return self.wants() | (ROOM if any(line.unread for line in self.lines.values()) else 0)

    def move(self) -> None:
        """Send and take whatever can be."""
        if any(receiving.other is None for receiving in self.posted):
            for other in self._others:
                if self._directory.is_there(other):
                    self.line(other)
        for line in list(self.lines.values()):
            if line.error is None:
                self._push(line)
                if self.posted or line.coming is not None:
                    self._pull(line)
            elif self.posted:
                self._pull(line)

    def fail(self, line: Line, error: CollectiveFailed, tell: bool = True) -> None:
        """Nothing passes any more between this rank and that one. Args: tell: the other one does not know yet."""
        line.error = error
        failed: list[Pending] = [*line.leaving, *line.unread]
        failed += [receiving for receiving in self.posted if receiving.other == line.channel.other]
        coming = line.coming
        failed += [kept.receiving for kept in line.kept if kept.receiving is not None]
        if isinstance(coming, Receiving):
            failed.append(coming)
        for pending in failed:
            pending.error = pending.error or error
        self.posted = [receiving for receiving in self.posted if receiving.error is None]
        line.leaving.clear()
        line.unread.clear()
        line.coming, line.is_read = None, not tell
        line.kept = [kept for kept in line.kept if line.is_read and kept.is_whole and kept.receiving is None]
        if tell:
            line.channel.fail(str(error))

    def check(self, line: Line) -> None:
        """Look whether the other rank has given up."""
        text = line.channel.failure() if line.error is None else None
        if text is not None:
            self._push(line)  # what it took before is done, and what it sent before has come
            self._pull(line)
            if line.error is None:
                self.fail(line, PeerLost(f"rank {self.names[line.channel.other]} gave up: {text}"), tell=False)

    def _check_new(self, line: Line, pending: Sending | Receiving) -> None:
        """Nobody is to wait where a message has failed before."""
        self.check(line)
        if line.error is not None:
            self.posted = [receiving for receiving in self.posted if receiving is not pending]
            kind = PeerLost if isinstance(line.error, PeerLost) else CollectiveFailed
            raise kind(
                f"{pending.describe(self.names)}: no messages pass between these ranks any more, since one has failed: "
                f"{line.error}"
            )

    def _push(self, line: Line) -> None:
        channel = line.channel
        while line.leaving:
            sending = line.leaving[0]
            while sending.end is None:
                length = min(SLICE_BYTES, sending.size_bytes - sending.at)
                head = Head(length, sending.tag, DTYPE_NUMBERS[sending.dtype], sending.size_bytes, sending.at == 0)
                if not channel.put(head, sending.data[sending.at : sending.at + length]):
                    break
                sending.at += length
                if sending.at == sending.size_bytes:
                    sending.end = channel.sent
            else:
                line.leaving.popleft()
                if channel.is_found:
                    sending.finish()
                else:
                    line.unread.append(sending)
                continue
            break
        if line.unread:
            taken = channel.taken
            while line.unread and (line.unread[0].end or 0) <= taken:
                line.unread.popleft().finish()

    def _pull(self, line: Line) -> None:
        channel = line.channel
        while line.is_read and (head := channel.coming()) is not None:
            if line.coming is None:
                line.coming = self._claimed(line, head)
                if line.coming is None:
                    return
            coming = line.coming
            if isinstance(coming, Receiving) and (
                head.size_bytes != coming.size_bytes or DTYPES[head.dtype] != coming.dtype
            ):
                self._refuse(line, coming, head.size_bytes, head.dtype)
                return
            end = coming.at + head.slice_bytes
            channel.take(head, coming.data[coming.at : end], ends=end == coming.size_bytes)
            coming.at = end
            if end == coming.size_bytes:
                line.coming = None
                self._arrived(line, coming)

    def _claimed(self, line: Line, head: Head) -> Receiving | Kept | None:
        """Whose the message is; None where it is to stay where it is."""
        other, behind = line.channel.other, False
        for number, receiving in enumerate(self.posted):
            if receiving.other in (None, other):
                if receiving.tag == head.tag:
                    receiving.source = other
                    return self.posted.pop(number)
                behind = True
        if not behind:
            return None
        kept = Kept(head.tag, DTYPES[head.dtype], head.size_bytes)
        line.kept.append(kept)
        return kept

    def _arrived(self, line: Line, coming: Receiving | Kept) -> None:
        if isinstance(coming, Receiving):
            coming.finish()
        elif coming.receiving is not None:
            self._hand_over(line, coming)

    def _was_kept(self, receiving: Receiving) -> bool:
        others = self._others if receiving.other is None else [receiving.other]
        for line in (self.lines[other] for other in others if other in self.lines):
            for kept in line.kept:
                if kept.tag == receiving.tag and kept.receiving is None:
                    kept.receiving, receiving.source = receiving, line.channel.other
                    if kept.is_whole:
                        self._hand_over(line, kept)
                    return True
        return False

    def _hand_over(self, line: Line, kept: Kept) -> None:
        receiving = kept.receiving
        assert receiving is not None
        if kept.size_bytes != receiving.size_bytes or kept.dtype != receiving.dtype:
            self._refuse(line, receiving, kept.size_bytes, DTYPE_NUMBERS[kept.dtype])
            return
        line.kept.remove(kept)
        receiving.data.copy_(kept.data)
        receiving.finish()

    def _refuse(self, line: Line, receiving: Receiving, size_bytes: int, dtype: int) -> None:
        sent, names = DTYPES[dtype], self.names
        error = CollectiveFailed(
            f"rank {names[line.channel.other]} sends {size_bytes // sent.itemsize:,} x "
            f"{str(sent).removeprefix('torch.')} with tag {receiving.tag} where rank {names[self.rank]} calls "
            f"{receiving.describe(names)}. Both ends of a message must have as many numbers of the same type."
        )
        receiving.error = error
        self.fail(line, error)
