"""Batches of a prepared loader come on the run's device. The device of these tests is "meta", which
every machine has.
"""

from collections import UserDict
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.loader import shard_batches
from shoal.data.tree_map import tensors_in, to_device

META = torch.device("meta")


def devices(batch: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors_in(batch)}


def test_every_tensor_of_a_batch_is_moved_and_the_loader_still_knows_it() -> None:
    loader = shard_batches(DataLoader(TensorDataset(torch.ones(10, 3), torch.ones(10)), 4), 1, 2, 0)
    loader.device = META
    rows = []
    for x, y in loader:
        assert devices([x, y]) == {"meta"}
        shard = loader.yielded.shard_of(x)
        assert shard is not None
        rows.append((len(x), shard.rows, shard.global_rows))
    assert rows == [(2, 2, 4), (2, 2, 4), (1, 1, 2)]


def test_a_stream_is_moved_too() -> None:
    loader = shard_batches([{"x": torch.ones(4, 2)}, {"x": torch.ones(4, 2)}], 0, 2, 0)
    loader.device = META
    assert [devices(batch) for batch in loader] == [{"meta"}, {"meta"}]


def test_a_nest_keeps_its_classes_its_texts_and_the_lengths_of_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = UserDict(x=torch.ones(2), file=["a", "b"], rate=0.5, packed=packed)
    moved = to_device(batch, META)
    assert isinstance(moved, UserDict)
    assert devices(moved["x"]) == {"meta"}
    assert (moved["file"], moved["rate"]) == (["a", "b"], 0.5)
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert moved["packed"].batch_sizes.device.type == "cpu"  # torch asks for that


def test_a_tensor_that_is_there_already_stays_the_same() -> None:
    run = shoal.init(announce=lambda _: None)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = DataLoader(TensorDataset(torch.ones(4, 3)), 2)
    _, _, loader = run.prepare(model, optimizer, samples)
    for (x,) in loader:
        assert run.to_device(x) is x
        assert x.to(run.device) is x
