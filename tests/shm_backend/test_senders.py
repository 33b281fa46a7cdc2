"""A message whose receiver ends right after it has it was sent: no error at the sender."""

import os

import pytest
import torch
import torch.distributed as dist

from shoal.testing import world


@pytest.mark.parametrize(
    "times", [1, pytest.param(60, marks=pytest.mark.slow)], ids=["once", "many times"]
)
def test_a_sender_may_outlive_its_receiver(times: int) -> None:
    for length in [1, 300_000][: 1 + (times > 1)] * times:
        with world.start(2, _send_and_end, length) as running:
            codes = running.wait()
        assert codes == [0, 0], running.failures


def _send_and_end(length: int) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(length), 1)
    else:
        dist.recv(got := torch.zeros(length), 0)
        assert got.sum().item() == length
    os._exit(0)
