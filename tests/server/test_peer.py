"""What goes out first of what waits to be sent."""

from __future__ import annotations

import torch
from shaken import channels, new_memory

from shoal.server.messages import Op
from shoal.server.peer import Peer


def test_values_go_out_in_the_order_of_the_forward_pass():
    with channels("unix", False) as (ours, theirs):
        peer = Peer(ours, "worker")
        # Nobody reads yet, and the socket takes less than a part: all but the first wait.
        for part in (0, 3, 1, 2):
            peer.post(Op.VALUE, torch.zeros(2**20), part=part)
        heard = [theirs.receive(new_memory)[0].part for _ in range(4)]
        peer.close()
    assert heard == [0, 1, 2, 3]
