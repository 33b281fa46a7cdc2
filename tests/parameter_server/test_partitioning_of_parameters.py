"""Sizes of partitions, and their even assignment to servers."""

from __future__ import annotations

import pytest
import torch

from shoal.parameter_server.partitioning import (
    SMALL_PART_BYTES,
    ParamMeta,
    assign,
    partition,
    partition_bytes,
)
from shoal.platform.tensors import MIB


def cut_for(
    servers: int, one_machine: bool, *lengths: int, most_bytes: int = 4 * MIB
) -> tuple[list[int], list[int]]:
    """Return the bytes of each partition of a model, and of each server."""
    shapes = {
        f"p{number}": ParamMeta(length, torch.float32, 0) for number, length in enumerate(lengths)
    }
    parts = partition(shapes, partition_bytes(shapes, servers, most_bytes, one_machine=one_machine))
    given = [0] * servers
    for part, owner in zip(parts, assign(parts, servers), strict=True):
        given[owner] += part.size_bytes
    return [part.size_bytes for part in parts], given


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [100_001, 262_144, 1_000_003])
def test_on_one_host_a_small_model_has_as_many_partitions_as_servers(servers, length):
    sizes, given = cut_for(servers, True, length)
    assert len(sizes) == servers
    assert max(given) - min(given) <= 64


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_between_hosts_a_server_has_several_partitions(servers):
    sizes, given = cut_for(servers, False, 1_000_000)
    assert len(sizes) == 4 * servers
    assert max(given) - min(given) <= 64


@pytest.mark.parametrize("one_machine", [True, False])
def test_a_large_model_has_full_partitions_spread_evenly_over_servers(one_machine):
    sizes, given = cut_for(2, one_machine, 10 * MIB // 4 * 10)
    assert max(sizes) <= 4 * MIB
    assert min(sizes) > 3.5 * MIB
    assert abs(given[0] - given[1]) <= 64


def test_a_little_more_than_full_partitions_is_divided_evenly():
    sizes, given = cut_for(2, True, 10 * MIB // 4)
    assert sizes == [2.5 * MIB] * 4
    assert given == [5 * MIB] * 2


@pytest.mark.parametrize("one_machine", [True, False])
def test_a_tiny_model_is_one_partition_for_any_number_of_servers(one_machine):
    assert cut_for(3, one_machine, 1000, 24, 5) == ([4116], [4116, 0, 0])
    assert cut_for(2, one_machine, SMALL_PART_BYTES // 4)[0] == [SMALL_PART_BYTES]


def test_the_user_may_choose_smaller_partitions():
    assert cut_for(2, True, 1000, most_bytes=400) == ([400] * 10, [2000] * 2)
    assert cut_for(2, True, 3, most_bytes=0) == ([4] * 3, [8, 4])  # less than one value becomes one
