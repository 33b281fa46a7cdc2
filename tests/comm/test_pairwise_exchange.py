"""The all-reduce by pairwise exchange adds in the order of ranks, whatever the lengths."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm import pairwise_exchange

LIMIT_S = 20.0
CHUNK_BYTES = 64
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Post:
    """Messages between threads, as Gloo has them: a send ends when its receive has begun."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[Any, list[Message]] = defaultdict(list)


class Message:
    """One end of a message. As with Gloo, it can be waited for once."""

    def __init__(self, post: Post, tensor: Tensor) -> None:
        self.post, self.tensor = post, tensor
        self.is_done = self.was_awaited = False

    def wait(self) -> None:
        assert not self.was_awaited
        self.was_awaited = True
        with self.post.changed:
            assert self.post.changed.wait_for(lambda: self.is_done, LIMIT_S), "no other end"


class FakeGloo:
    """One rank's end of a `Post`."""

    def __init__(self, post: Post, rank: int, size: int) -> None:
        self.post, self._rank, self._size, self.sent_bytes = post, rank, size, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Message:
        self.sent_bytes += tensors[0].nbytes
        return self._meet(tensors[0], ("send", self._rank, target), ("recv", self._rank, target))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Message:
        return self._meet(tensors[0], ("recv", source, self._rank), ("send", source, self._rank))

    def _meet(self, tensor: Tensor, here: Any, there: Any) -> Message:
        message = Message(self.post, tensor)
        with self.post.changed:
            if self.post.waiting[there]:
                other = self.post.waiting[there].pop(0)
                ends = (message, other) if here[0] == "recv" else (other, message)
                ends[0].tensor.copy_(ends[1].tensor)
                message.is_done = other.is_done = True
                self.post.changed.notify_all()
            else:
                self.post.waiting[here].append(message)
        return message


def _average(tensors: list[Tensor]) -> list[int]:
    """Average in place, with a thread for each rank; return the bytes that each has sent."""
    post, size = Post(), len(tensors)
    ranks = [FakeGloo(post, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(pairwise_exchange.average, ranks, tensors))
    assert not any(post.waiting.values())
    return [rank.sent_bytes for rank in ranks]


@given(
    size=st.integers(1, 5),
    length=st.integers(0, 600),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**30),
)
def test_every_length_is_averaged_in_the_order_of_ranks(
    size: int, length: int, dtype: torch.dtype, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    terms = [torch.randn(length, generator=made).to(dtype) for _ in range(size)]
    expected = terms[0].clone()
    for term in terms[1:]:
        expected = expected + term
    expected /= size
    reduced = [term.clone() for term in terms]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise_exchange, "CHUNK_BYTES", CHUNK_BYTES)
        sent = _average(reduced)
    assert all(tensor.equal(expected) for tensor in reduced)
    bytes_of_a_ring = 2 * (size - 1) * -(-length // size) * dtype.itemsize
    assert all(0 <= bytes_of_a_ring - found <= 4 * size * CHUNK_BYTES for found in sent)


@pytest.mark.parametrize("size", range(2, 9))
def test_terms_are_reduced_before_their_memory_is_received_into_again(size: int) -> None:
    slices, buffers, ahead = 20, pairwise_exchange.BUFFERS, pairwise_exchange.AHEAD
    steps = list(pairwise_exchange.schedule(slices, size))
    assert len(steps) == 2 * slices * (size - 1)
    for index in range(slices - buffers):
        is_reduced = steps.index(pairwise_exchange.ExchangeStep(index, True, 1))
        overwritten = steps.index(pairwise_exchange.ExchangeStep(index + buffers, False, 1))
        assert overwritten - ahead > is_reduced
