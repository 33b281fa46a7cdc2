"""One rank's connections to the other ranks of its pipeline: single tensors, for the whole run.

[1] *Release.* A tensor must stay alive until its send is complete. Gloo reports a send as complete
    only after `wait()`, and an early `wait()` would block. A reply shows that the peer has received
    what was sent before, so the wait is over at once; the tensor is freed then. Without this, a
    rank would keep the activations of all micro-batches until the end of the step.
[2] *Directions.* NCCL runs all messages of two ranks of a group one after the other, in the order
    in which each of them has started its own. A rank that has begun to receive a gradient could not
    send activations before it came, and its peer may wait for these. So on GPUs messages to lower
    ranks have a group of their own, and in each group two ranks start the same messages in the same
    order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis, new_group
from shoal.strategies.pipeline.stage_messages import GradMask, TensorMeta, TensorMetas
from shoal.trace.recorder import Recorder

HeaderKey = tuple[int, Hashable]
"""A header is sent once for each key: the stage, and what determines the shapes of its values."""


class PendingRecv(NamedTuple):
    """A posted receive: `tensor` is filled when `work` is complete."""

    work: dist.Work
    tensor: Tensor


class P2PLink:
    """One rank's connections to the other ranks of its pipeline, for the whole run.

    Args:
        axis: the pipeline axis.
        recorder: records the messages in a trace.
        downward: the group for messages to lower ranks [2]; None for the group of the axis.

    Attributes:
        sent_metas, received_metas, sent_masks, received_masks: the headers of earlier messages.
        sent_bytes: sum over all sends.
    """

    def __init__(
        self, axis: Axis, recorder: Recorder, downward: dist.ProcessGroup | None = None
    ) -> None:
        self.axis = axis
        self._downward = downward
        self.recorder = recorder
        self.sent_metas: dict[HeaderKey, TensorMetas] = {}
        self.received_metas: dict[HeaderKey, TensorMetas] = {}
        self.sent_masks: dict[HeaderKey, GradMask] = {}
        self.received_masks: dict[HeaderKey, GradMask] = {}
        self.sent_bytes = 0
        self._num_sent: Counter[int] = Counter()
        self._in_flight: dict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, receiver: int) -> int:
        """Start a send and return at once. Do not write into `tensor` afterwards.

        Returns: how many tensors were sent to `receiver` in this run, for `release`.
        """
        tensor = tensor.detach().contiguous()
        self.sent_bytes += tensor.numel() * tensor.element_size()
        work = dist.isend(tensor, group=self._group(self.axis.rank, receiver), group_dst=receiver)
        assert work is not None
        in_flight = self._in_flight[receiver]
        in_flight.append((work, tensor))
        self._num_sent[receiver] += 1
        while in_flight and in_flight[0][0].is_completed():
            in_flight.popleft()[0].wait()
        return self._num_sent[receiver]

    def release(self, receiver: int, count: int) -> None:
        """Free the first `count` tensors that were sent to `receiver`; it must have received
        them.
        """
        in_flight = self._in_flight[receiver]
        while in_flight and self._num_sent[receiver] - len(in_flight) < count:
            in_flight.popleft()[0].wait()

    def post_recv(self, meta: TensorMeta, sender: int) -> PendingRecv:
        """Post a receive of one tensor and return at once."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.axis.device)
        work = dist.irecv(tensor, group=self._group(sender, self.axis.rank), group_src=sender)
        assert work is not None
        return PendingRecv(work, tensor)

    def recv_header(self, length: int, sender: int) -> Tensor:
        """Receive a header: (length,), int64. Blocks."""
        pending = self.post_recv(TensorMeta(torch.int64, (length,), False), sender)
        pending.work.wait()
        return pending.tensor

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """Return the group in which `sender` sends to `receiver` [2]."""
        return self.axis.group if sender < receiver else self._downward or self.axis.group

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for in_flight in self._in_flight.values():
            while in_flight:
                in_flight.popleft()[0].wait()


def downward_group(axis: Axis) -> dist.ProcessGroup | None:
    """Make the group for messages to lower ranks [2]; None on the CPU, which needs none.

    Collective over the world.
    """
    return new_group(axis.all_groups) if axis.device.type == "cuda" else None
