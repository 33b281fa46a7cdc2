"""Which share a tensor came with."""

import torch

from shoal.data.shares import Share
from shoal.data.yielded import Yielded


def test_a_new_tensor_is_not_taken_for_one_that_is_gone() -> None:
    yielded, gone = Yielded(), set()
    for _ in range(100):
        tensor = torch.zeros(1)
        gone.add(id(tensor))
        yielded.remember([tensor], Share(0, 1, (0,), 1, 1))
        del tensor
    new = [torch.zeros(1) for _ in range(100)]
    assert gone & {id(tensor) for tensor in new}, "Python gives ids out again"
    assert yielded.shares_of(new) == []
