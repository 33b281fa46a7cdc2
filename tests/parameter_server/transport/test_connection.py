"""Time and order in which a connection sends its frames."""

from __future__ import annotations

import pytest
import torch
from connected_channels import KINDS, channels, new_memory

from shoal.errors import ConnectionLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.transport.connection import INLINE_SEND_BYTES, QueuedConnection


def test_values_go_out_in_the_order_of_the_forward_pass():
    with channels("unix") as (ours, theirs):
        peer = QueuedConnection(ours, "worker")
        # Nobody reads yet, and the socket takes less than a part: all but the first wait.
        for part in (0, 3, 1, 2):
            peer.post(Op.PARAMS, torch.zeros(2**20), partition=part)
        heard = [theirs.receive(new_memory)[0].partition for _ in range(4)]
        peer.close()
    assert heard == [0, 1, 2, 3]


def test_a_small_frame_waits_for_a_large_one_before_it():
    with channels("unix") as (ours, theirs):
        peer = QueuedConnection(ours, "worker")
        peer.post(Op.PUSH, torch.zeros(2**20), partition=1)
        peer.post(Op.GRAD_MASK, b"\1", partition=2)
        peer.post(Op.PUSH, b"x", partition=2)
        heard = [theirs.receive(new_memory)[0] for _ in range(3)]
        peer.close()
    assert [(header.op, header.partition) for header in heard] == [
        (Op.PUSH, 1),
        (Op.GRAD_MASK, 2),
        (Op.PUSH, 2),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [0, 1, 333, INLINE_SEND_BYTES])
def test_a_peer_that_does_not_read_blocks_no_caller_and_gets_all_frames(kind, size_bytes):
    count = 4000
    with channels(kind) as (ours, theirs):
        peer = QueuedConnection(ours, "worker")
        for step in range(count):
            peer.post(
                Op.STATS, bytes([step % 251]) * size_bytes, step=step
            )  # more than sockets hold
        came = [theirs.receive(new_memory) for _ in range(count)]
        peer.close()
    assert [header.step for header, _ in came] == list(range(count))
    assert all(
        bytes(payload) == bytes([header.step % 251]) * size_bytes for header, payload in came
    )


def test_to_post_to_a_peer_that_has_gone_is_no_error():
    with channels("unix") as (ours, theirs):
        peer = QueuedConnection(ours, "worker")
        theirs.close()
        peer.post(Op.STEP, b"{}")
        peer.post(Op.PUSH, torch.zeros(2**20))
        with pytest.raises(ConnectionLost):
            peer.receive(new_memory)
        peer.close()
