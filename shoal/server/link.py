"""A worker's connection to one shard, whoever is its primary: what has no answer yet is said again to the next one."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from shoal.errors import ServerLost, WireError
from shoal.server.arbiter import View
from shoal.server.channel import Channel, is_loopback
from shoal.server.frame import Header
from shoal.server.handshake import connect
from shoal.server.messages import SHARED, Op, unpack
from shoal.server.peer import Payload, Peer
from shoal.server.shared import Attached, Memory, attach
from shoal.server.views import AGAIN_S, Views

RECOVER_S = 60.0
"""How long a shard may be without a primary."""
Push = tuple[int, Tensor, bytes]
"""Step, gradient, and which of its segments have one."""


class Link:
    """One worker's talk with one shard.

    Args:
        parts: of the shard.
        place: where a frame's payload goes.
        lent, lent_at: the memory of this worker's gradients, and where in it each part lies, in bytes.
        take: is given every value that came, and the memory that it lies in, where that is not ours.
        waits: whether the values of this part and step have not come yet.
        lost: is told once, when nobody holds the shard any more.
    """

    def __init__(
        self,
        worker: int,
        shard: int,
        parts: Iterable[int],
        views: Views,
        *,
        key: bytes,
        job: str,
        limit_bytes: int,
        place: Callable[[Header], memoryview | None],
        take: Callable[[Header, Attached | None], None],
        lent: Memory,
        lent_at: Mapping[int, int],
        waits: Callable[[int, int], bool],
        lost: Callable[[ServerLost], None],
    ) -> None:
        self.worker, self.shard, self.parts, self.views = worker, shard, list(parts), views
        self.key, self.job, self.limit_bytes = key, job, limit_bytes
        self._place, self._take, self._waits, self._lost = place, take, waits, lost
        self._lent, self._lent_at = lent, lent_at
        self._lending = False
        self._borrowed: Attached | None = None
        self._lock = threading.Lock()
        self._pushed: dict[int, Push] = {}
        self._order: tuple[int, bytes] | None = None
        self._question: tuple[Op, Payload, dict[str, int]] | None = None
        self._answers: queue.SimpleQueue[tuple[Header, memoryview] | ServerLost] = queue.SimpleQueue()
        self._peer: Peer | None = None
        self._closed = False
        self.takeovers = 0
        threading.Thread(target=self._live, name=f"shard {shard}", daemon=True).start()

    def push(self, part: int, push: Push) -> None:
        """Send a gradient; it must not change before the values of the next step have come."""
        with self._lock:
            self._pushed[part] = push
            self._post_push(part)

    def order(self, step: int, payload: bytes) -> None:
        """Send a step's order."""
        with self._lock:
            self._order = (step, payload)
            self._post(Op.ORDER, payload, step=step)

    def post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        """Send what has no answer; it may be lost with the primary."""
        with self._lock:
            self._post(op, payload, **fields)

    def ask(self, op: Op, payload: Payload = b"", **fields: int) -> memoryview:
        """Send a question and wait for its answer. Raises ServerLost."""
        with self._lock:
            self._question = (op, payload, fields)
            self._post(op, payload, **fields)
        while True:
            found = self._answers.get()
            if isinstance(found, ServerLost):
                self._answers.put(found)
                raise found
            header, answer = found
            if header.op == op and header.part == fields.get("part", 0):  # else to one that was asked twice
                with self._lock:
                    self._question = None
                return answer

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        if self._peer is not None:
            self._peer.post(op, payload, **fields)

    def _post_push(self, part: int) -> None:
        step, gradient, present = self._pushed[part]
        if 0 in present:
            self._post(Op.PRESENT, present, part=part)
        at_bytes = self._lent_at.get(part) if self._lending else None
        if at_bytes is None:
            self._post(Op.PUSH, gradient, part=part, step=step)
        else:
            high, low = at_bytes >> 32, at_bytes & 0xFFFFFFFF
            self._post(Op.PUSH, part=part, step=step, flags=SHARED, epoch=high, worker=low)

    def _live(self) -> None:
        """Be connected to the primary, whoever it is."""
        epoch, since = 1, time.monotonic()
        while not self._closed:
            view = self.views.newest(self.shard, RECOVER_S, lambda view, epoch=epoch: view.epoch >= epoch)  # type: ignore[misc]
            if view is None or view.lost or time.monotonic() > since + RECOVER_S:
                self._give_up(view)
                return
            try:
                peer = self._meet(view)
                self._say_again(peer)
                self._listen(peer)
            except Refusal as error:
                self._give_up(view, str(error))
                return
            except (OSError, WireError):
                before = self._peer
                with self._lock:
                    self._peer = None
                if before is not None:  # it was there until now
                    before.close()
                    since = time.monotonic()
                epoch = view.epoch
                time.sleep(AGAIN_S)

    def _give_up(self, view: View | None, reason: str = "") -> None:
        if self._closed:
            return
        if not reason:
            reason = (
                "its servers are gone, and nobody holds what they held"
                if view is not None and view.lost
                else f"it has had no primary for {RECOVER_S:g} s"
            )
        error = ServerLost(
            f"shard {self.shard} of the parameter servers is lost: {reason}. The same command goes on from the last "
            "checkpoint; with replicas=2 a run survives the loss of a server."
        )
        self._answers.put(error)
        self._lost(error)

    def _meet(self, view: View) -> Peer:
        if view.primary is None:
            raise WireError("no primary")
        connection = socket.create_connection(view.addresses[view.primary], timeout=5)
        session = connect(connection, self.key, f"{self.job}/{view.primary}", self.worker)
        secret = not is_loopback(connection)
        channel = Channel(connection, session, authenticate_payload=secret, limit_bytes=self.limit_bytes)
        return Peer(channel, f"shard {self.shard}")

    def _say_again(self, peer: Peer) -> None:
        """Everything that the last primary has not answered."""
        with self._lock:
            self._peer = peer
            self.takeovers += 1
            self._lending, self._borrowed = False, None
            if self._lent_at:
                self._post(Op.SHARE, json.dumps(self._lent.description).encode())
            for part, (step, _, _) in self._pushed.items():
                if self._waits(part, step + 1):
                    self._post_push(part)
            if self._order is not None and any(self._waits(part, self._order[0] + 1) for part in self.parts):
                self._post(Op.ORDER, self._order[1], step=self._order[0])
            if self._question is not None:
                op, payload, fields = self._question
                self._post(op, payload, **fields)

    def _listen(self, peer: Peer) -> None:
        while True:
            header, payload = peer.receive(self._place)
            if header.op == Op.VALUE:
                self._take(header, self._borrowed if header.flags & SHARED else None)
            elif header.op == Op.SHARE:
                self._share(payload)
            elif header.op == Op.REFUSED:
                said = bytes(payload).decode()
                if "is not the primary" not in said:
                    raise Refusal(said)
                raise WireError(said)
            else:
                self._answers.put((header, payload))

    def _share(self, payload: memoryview) -> None:
        """The server has this worker's memory, and lends its own."""
        found = attach(unpack(payload))
        with self._lock:
            self._lending, self._borrowed = found is not None, found
            if found is not None:
                self._post(Op.SHARE, b"{}")


class Refusal(Exception):
    """A server took what this worker said for nonsense."""
