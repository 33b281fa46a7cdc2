"""Which share a tensor came with."""

import torch

from shoal.data.batch_shards import BatchRegistry, BatchShard


def test_a_new_tensor_is_not_taken_for_one_that_is_gone() -> None:
    yielded, gone = BatchRegistry(), set()
    for _ in range(100):
        tensor = torch.zeros(1)
        gone.add(id(tensor))
        yielded.remember([tensor], BatchShard(0, 1, 1, 1))
        del tensor
    new = [torch.zeros(1) for _ in range(100)]
    assert gone & {id(tensor) for tensor in new}, "Python gives ids out again"
    assert not any(map(yielded.shard_of, new))
