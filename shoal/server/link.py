"""A worker's connection to one shard, whoever is its primary: what has no answer yet is said again to the next one.

What was said of a part goes along when the part moves to another shard, whose link says it there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shoal.comm.memory import Attached, Memory, attach
from shoal.errors import ServerLost, WireError
from shoal.server import blocks
from shoal.server.arbiter import View
from shoal.server.frame import Header
from shoal.server.messages import BLOCKS, SHARED, Op, unpack
from shoal.server.peer import Payload, Peer
from shoal.server.transport_settings import Transport
from shoal.server.views import AGAIN_S, Views

RECOVER_S = 60.0
"""How long a shard may be without a primary."""
Push = tuple[int, Tensor, bytes, bool]
"""Step, gradient, which of its segments have one, and whether most of it is zeros."""
Question = tuple[Op, Payload, dict[str, int]]


@dataclass
class Said:
    """Of one part, to whoever answers for it."""

    push: Push | None = None
    questions: dict[Op, Question] = field(default_factory=dict)


class Link:
    """One worker's talk with one shard.

    Args:
        place: where a frame's payload goes.
        lent, lent_at: memory of this worker's that servers may read, and where in it each part's gradient is laid for
            those that do, in bytes.
        take: is given every value that came, its payload, and the memory that it lies in where that is not ours.
        answered: is given every answer to a question.
        moved: is told of a part that this shard does not answer for, or not now, and of what it was asked in vain.
        waits: whether the values of this part and step have not come yet.
        lost: is told once, when nobody holds the shard any more.
        order: the last one that other shards have been sent.
    """

    def __init__(
        self,
        worker: int,
        shard: int,
        views: Views,
        *,
        transport: Transport,
        place: Callable[[int, Header], memoryview | None],
        take: Callable[[int, Header, memoryview, Attached | None], None],
        answered: Callable[[Header, memoryview], None],
        moved: Callable[[int, Op], None],
        lent: Memory,
        lent_at: Mapping[int, int],
        waits: Callable[[int, int], bool],
        lost: Callable[[ServerLost], None],
        order: tuple[int, bytes] | None,
    ) -> None:
        self.worker, self.shard, self.views = worker, shard, views
        self.transport = transport
        self._place, self._take, self._answered, self._moved = place, take, answered, moved
        self._waits, self._lost = waits, lost
        self._lent, self._lent_at = lent, lent_at
        self._lending = False
        self._borrowed: Attached | None = None
        self._lock = threading.Lock()
        self._said: dict[int, Said] = {}
        self._about_shard: Question | None = None
        self._order = order
        self._recording = False
        self._receiving = threading.Lock()
        self._peer: Peer | None = None
        self._met: int | None = None
        self._closed = False
        threading.Thread(target=self._live_or_say, name=f"shard {shard}", daemon=True).start()

    def push(self, part: int, push: Push, now: bool) -> None:
        """Send a gradient; it must not change before the values of the next step have come."""
        with self._lock:
            self._said.setdefault(part, Said()).push = push
            if now:
                self._post_push(part, push)

    def order(self, step: int, payload: bytes) -> None:
        """Send a step's order."""
        with self._lock:
            self._order = (step, payload)
            self._post(Op.ORDER, payload, step=step)

    def post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        """Send what has no answer; it may be lost with the primary."""
        with self._lock:
            self._post(op, payload, **fields)

    def ask(self, part: int, question: Question, now: bool) -> None:
        """Send a question about a part; the answer goes to `answered`."""
        with self._lock:
            self._said.setdefault(part, Said()).questions[question[0]] = question
            if now:
                self._post_question(question)

    def ask_shard(self, question: Question) -> None:
        """Send a question about the shard itself."""
        with self._lock:
            self._about_shard = question
            self._post_question(question)

    def follow(self, view: View) -> None:
        """Hang up on a primary when another has taken its place: one that was stopped never does so itself."""
        with self._lock:
            peer = self._peer if self._met != view.primary else None
        if peer is not None:
            peer.close()

    def record(self) -> None:
        """Have the shard note what it does, whoever is its primary; before anything else is said on a connection."""
        with self._lock:
            self._recording = True
            self._post(Op.RECORD)

    def hand_over(self, part: int) -> Said:
        """What was said of a part and has no answer: somebody else is to say it again."""
        with self._receiving, self._lock:  # not while the part's own values are coming in
            return self._said.pop(part, Said())

    def take_over(self, part: int, said: Said, now: bool) -> None:
        """Say again what was said of a part, or keep it until its move is over."""
        with self._lock:
            self._said[part] = said
            if now:
                self._say_part(part, said)

    def say_once_more(self, part: int, op: Op) -> None:
        """Repeat what was said in vain, unless somebody else is to say it."""
        with self._lock:
            said = self._said.get(part, Said())
            if op == Op.PUSH and said.push is not None:
                self._post_push(part, said.push)
            elif op in said.questions:
                self._post_question(said.questions[op])

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        if self._peer is not None:
            self._peer.post(op, payload, **fields)

    def _post_question(self, question: Question) -> None:
        op, payload, fields = question
        self._post(op, payload, **fields)

    def _post_push(self, part: int, push: Push) -> None:
        step, gradient, present, sparse = push
        if 0 in present:
            self._post(Op.PRESENT, present, part=part)
        at_bytes = self._lent_at.get(part) if self._lending else None
        which = blocks.touched(gradient) if sparse and at_bytes is None else None
        if at_bytes is not None:
            lent = self._lent.tensor(at_bytes, gradient.numel(), gradient.dtype)
            if lent.data_ptr() != gradient.data_ptr():
                lent.copy_(gradient)
                self._said[part].push = (step, lent, present, sparse)  # the other one need not be kept
            high, low = at_bytes >> 32, at_bytes & 0xFFFFFFFF
            self._post(Op.PUSH, part=part, step=step, flags=SHARED, epoch=high, worker=low)
        elif which is not None and blocks.are_few(which):
            self._post(Op.PUSH, blocks.pack(gradient, which), part=part, step=step, flags=BLOCKS)
        else:
            self._post(Op.PUSH, gradient, part=part, step=step)

    def _live_or_say(self) -> None:
        try:
            self._live()
        except BaseException as error:  # a value that is too stale, say: all would wait for ever
            self._give_up(None, f"what its server said cannot be right ({error!r}), and what follows is not believed")
            raise

    def _live(self) -> None:
        """Be connected to the primary, whoever it is."""
        epoch, since = 1, time.monotonic()
        while not self._closed:
            view = self.views.newest(self.shard, RECOVER_S, lambda view, epoch=epoch: view.epoch >= epoch)  # type: ignore[misc]
            if view is not None and view.retired:
                return
            if view is None or view.lost or time.monotonic() > since + RECOVER_S:
                self._give_up(view)
                return
            try:
                peer = self._meet(view)
                self._say_again(peer, view)
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
        self._lost(
            ServerLost(
                f"shard {self.shard} of the parameter servers is lost: {reason}. The same command goes on from the "
                "last checkpoint; with replicas=2 a run survives the loss of a server."
            )
        )

    def _meet(self, view: View) -> Peer:
        if view.primary is None:
            raise WireError("no primary")
        channel = self.transport.connect(view.addresses[view.primary], view.primary, self.worker)
        return Peer(channel, f"shard {self.shard}")

    def _say_again(self, peer: Peer, view: View) -> None:
        """Everything that the last primary has not answered."""
        with self._lock:
            self._peer, self._met = peer, view.primary
            self._lending, self._borrowed = False, None
            if self._recording:
                self._post(Op.RECORD)
            if self._lent_at:
                self._post(Op.SHARE, json.dumps(self._lent.description).encode())
            for part, said in self._said.items():
                self._say_part(part, said)
            if self._order is not None:
                self._post(Op.ORDER, self._order[1], step=self._order[0])
            if self._about_shard is not None:
                self._post_question(self._about_shard)
        if self.views.newest(self.shard, 0, lambda newest: newest.primary == view.primary) is None:
            raise WireError("another server has become the primary meanwhile")

    def _say_part(self, part: int, said: Said) -> None:
        if said.push is not None and self._waits(part, said.push[0] + 1):
            self._post_push(part, said.push)
        for question in said.questions.values():
            self._post_question(question)

    def _listen(self, peer: Peer) -> None:
        receiving = False

        def place(header: Header) -> memoryview | None:
            nonlocal receiving
            if header.op != Op.VALUE:
                return None
            self._receiving.acquire()
            receiving = True
            return self._place(self.shard, header)

        while True:
            try:
                header, payload = peer.receive(place)
                if header.op == Op.VALUE and not receiving:
                    self._receiving.acquire()
                    receiving = True
                self._hear(header, payload)
            finally:
                if receiving:
                    receiving = False
                    self._receiving.release()

    def _hear(self, header: Header, payload: memoryview) -> None:
        match header.op:
            case Op.VALUE:
                with self._lock:
                    self._said.get(header.part, Said()).questions.pop(Op.PULL, None)
                self._take(self.shard, header, payload, self._borrowed if header.flags & SHARED else None)
            case Op.SHARE:
                self._share(payload)
            case Op.MOVED:
                self._moved(header.part, Op(header.step))
            case Op.REFUSED:
                said = bytes(payload).decode()
                if "is not the primary" not in said:
                    raise Refusal(said)
                raise WireError(said)
            case Op.FIGURES | Op.HISTORY:
                with self._lock:
                    self._about_shard = None
                self._answered(header, payload)
            case _:
                with self._lock:
                    asked = self._said.get(header.part, Said()).questions.pop(Op(header.op), None)
                if asked is not None:  # or else it is asked elsewhere by now
                    self._answered(header, payload)

    def _share(self, payload: memoryview) -> None:
        """The server has this worker's memory, and lends its own."""
        found = attach(unpack(payload))
        with self._lock:
            self._lending, self._borrowed = found is not None, found
            if found is not None:
                self._post(Op.SHARE, b"{}")


class Refusal(Exception):
    """A server took what this worker said for nonsense."""
