import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import mesh
from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh, init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.errors import EnvironmentConflict, LaunchError
from shoal.launch.environment import RankInfo, read
from shoal.platform import sockets
from shoal.testing import world
from tests.harness.in_turn import in_turn


def joined(**degrees: int) -> Mesh:
    return init_mesh(read(os.environ), helpers=False, degrees=ParallelDims(**degrees))


def who(axis: Axis) -> tuple[int, ...]:
    """Return the ranks of an axis, by a sum of one-hot vectors; check all its collectives."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mine[dist.get_rank()] = 1
    first = torch.tensor(dist.get_rank())
    axis.broadcast_tensor(first)
    found = axis.all_reduce(mine).nonzero().flatten().tolist()
    assert (found[0], found[axis.rank], len(found)) == (first.item(), dist.get_rank(), axis.size)
    assert axis.all_gather_str(str(dist.get_rank())) == [str(rank) for rank in found]
    assert axis.broadcast_str(str(dist.get_rank())) == str(found[0])
    axis.barrier()
    return tuple(found)


def groups_of(degrees: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    mesh = joined(**degrees)
    return tuple(who(axis) for axis in (mesh.pipeline, mesh.data, mesh.tensor))


def test_every_axis_reaches_those_that_differ_in_nothing_else() -> None:
    found = world.run(8, groups_of, {"pipeline": 2, "tensor": 2})
    assert found[0] == ((0, 4), (0, 2), (0, 1))
    assert found[7] == ((3, 7), (5, 7), (6, 7))


def test_what_no_strategy_spans_is_data() -> None:
    assert world.run(4, groups_of, {"tensor": 2})[3] == ((3,), (1, 3), (2, 3))
    assert world.run(3, groups_of, {"tensor": 3})[1] == ((1,), (1,), (0, 1, 2))


def groups_made() -> tuple[bool, int]:
    before = dist.distributed_c10d._world.group_count
    mesh = joined()
    return mesh.data is mesh, dist.distributed_c10d._world.group_count - before


def test_a_world_of_data_alone_makes_no_group() -> None:
    assert world.run(3, groups_made) == [(True, 0)] * 3


def torch_mesh(degrees: dict[str, int]) -> tuple[dict[str, list[int]], bool]:
    mesh = joined(**degrees)
    root = mesh.device_mesh
    assert root is mesh.device_mesh
    names = root.mesh_dim_names or ()
    groups = {name: dist.get_process_group_ranks(root[name].get_group()) for name in names}
    return groups, "tensor" not in groups or root.get_group("tensor") is (
        mesh.tensor.group or dist.group.WORLD
    )


@pytest.mark.slow
def test_torch_sees_one_mesh_of_the_same_lines() -> None:
    all_dimensions = {"pipeline": 2, "tensor": 2, "dp_shard": 1}
    hybrid = {"tensor": 2, "dp_shard": 2}
    found = world.run(8, in_turn, torch_mesh, (all_dimensions,), (hybrid,))
    assert found[5][0] == (
        {"pipeline": [1, 5], "replicate": [5, 7], "shard": [5], "tensor": [4, 5]},
        True,
    )
    assert found[3][1] == ({"replicate": [3, 7], "shard": [1, 3], "tensor": [2, 3]}, True)
    tensor_alone, shard_alone = world.run(2, in_turn, torch_mesh, ({"tensor": 2},), ({},))[1]
    assert tensor_alone == ({"shard": [1], "tensor": [0, 1]}, True)
    assert shard_alone == ({"shard": [0, 1]}, True)


def wrong_world() -> None:
    joined(tensor=2, pipeline=3)


def round_the_machines() -> None:
    os.environ["LOCAL_RANK"] = str({0: 0, 1: 0, 2: 1, 3: 1}[int(os.environ["RANK"])])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    joined(tensor=2)


def test_ranks_that_cannot_stand_so_are_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"needs a multiple of 6 ranks; there are 4. Start 6 ranks"
    ):
        world.run(4, wrong_world)
    with pytest.raises(LaunchError, match="ranks go round the machines"):
        world.run(4, round_the_machines)


def beside() -> list[int]:
    group = joined(tensor=2).data.new_group()
    assert group is not None
    return dist.get_process_group_ranks(group)


def test_a_group_beside_training_is_of_the_line() -> None:
    assert world.run(4, beside) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_name_of_rank_0_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "NAME_WAIT_S", 0)
    place = RankInfo(1, 2, 0, 1, "slurm", "n1.invalid", 29500, "")
    with pytest.raises(EnvironmentConflict, match=r"no address of n1\.invalid.*Set MASTER_ADDR"):
        mesh.join_world(place, "gloo", timedelta(seconds=1))


def test_a_wait_for_the_name_of_rank_0_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "NOTE_S", 0)
    with pytest.raises(OSError, match="not known"):
        sockets.wait_for_address("n1.invalid", 1)
    assert len(caplog.messages) == 1
    assert "waits up to 1 s for a name server that knows n1.invalid" in caplog.text


@pytest.mark.parametrize(("on_this_machine", "expected"), [(1, "eth1"), (2, None)])
def test_ranks_on_several_machines_meet_on_the_route_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, on_this_machine: int, expected: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(mesh, "wait_for_address", lambda *_: None)
    monkeypatch.setattr(mesh, "route_interface", lambda name: {"n1": "eth1"}[name])
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    place = RankInfo(1, 2, 0, on_this_machine, "slurm", "n1", 29500, "")
    mesh.join_world(place, "gloo", timedelta(seconds=1))
    assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == expected
