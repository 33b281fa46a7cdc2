"""Checkpoints of hosts that share no disk: copies, lost disks, other orders, interrupted saves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.errors import CheckpointError
from shoal.testing import world
from shoal.train.checkpoint import Checkpoints, Saved, file_exchange, manifest, newest
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.checkpoint.rank_consensus import rank
from shoal.train.checkpoint.separate_store import SeparateCheckpoints

IN_ORDER = (0, 1, 2)


def values(step: int) -> dict[str, Tensor]:
    """Two large tensors, and one that all ranks hold."""
    wide = torch.arange(3 * 12_000, dtype=torch.float64).reshape(3, -1)
    return {"rows": wide + step, "columns": wide.T * step, "count": torch.tensor(step)}


def state(step: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = values(step)
    return {
        "rows": distribute_tensor(full["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(full["columns"], mesh, [Shard(0)]),
        "count": full["count"],
    }


def store(folder: Path, order: Sequence[int] = IN_ORDER, copies: int = 1) -> SeparateCheckpoints:
    """Return the checkpoints of this rank: it runs on the host `order[rank]`, alone."""
    disks = HostDisks(tuple(range(len(order))), copies)
    return SeparateCheckpoints(folder / f"host{order[rank()]}/checkpoints", disks, keep=2)


def save(checkpoints: Checkpoints, step: int) -> None:
    private = {"generator": torch.tensor([rank(), step])}
    checkpoints.save(step, state(step), {"step": step, "loss": 0.1}, private, best=step == 2)


def loaded(checkpoints: Checkpoints, like: dict[str, Tensor] | None = None) -> tuple[int, str]:
    """Load, compare every number, and return the step and what was reported on rank 0."""
    notes: list[str] = []
    found = checkpoints.load(notes.append, like=(like or {}).get)
    assert found is not None
    assert_saved(found)
    return found.step, "; ".join(notes)


def assert_saved(found: Saved) -> None:
    full = values(found.step)
    assert found.info == {"step": found.step, "loss": 0.1}
    assert torch.equal(found.private["generator"], torch.tensor([rank(), found.step]))
    assert found.tensors.keys() == full.keys()
    for name, tensor in found.tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, full[name]), name


def files(folder: Path, host: int, step: int) -> list[str]:
    place = folder / f"host{host}/checkpoints" / manifest.name_of(step)
    return sorted(path.name for path in place.glob("*.distcp"))


def on_first(action) -> None:
    """Let rank 0 do something to the disks, while the others wait."""
    dist.barrier()
    if rank() == 0:
        action()
    dist.barrier()


def remove(folder: Path, host: int) -> None:
    shutil.rmtree(folder / f"host{host}")


def spoil(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def saves_and_loses(folder: Path) -> None:
    checkpoints = store(folder)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    if rank() == 0:
        # Of four steps two stay, and the best. Each host has its own file and that of the one
        # before it.
        names = {path.name for path in (folder / "host1/checkpoints").iterdir()}
        assert names == {"step-00000002", "step-00000003", "step-00000004", "latest", "best"}
        for host, expected in enumerate([(0, 2), (0, 1), (1, 2)]):
            assert files(folder, host, 4) == [f"__{writer}_0.distcp" for writer in expected]
    # A load of the same shards moves nothing.
    assert loaded(store(folder), state(4)) == (4, "")
    assert len(files(folder, 0, 4)) == 2

    # A host has lost its disk: its rank gets its shards back, and no more.
    on_first(lambda: remove(folder, 1))
    assert loaded(store(folder), state(4)) == (4, "")
    assert "__1_0.distcp" in files(folder, 1, 4)

    # The hosts come in another order, with another division: all is resharded.
    mesh = init_device_mesh("cpu", (3,))
    other = {"rows": distribute_tensor(values(4)["rows"], mesh, [Shard(1)])}
    assert loaded(store(folder, (2, 0, 1)), other) == (4, "")

    # A byte was flipped on one host: the copy of another one counts.
    save(store(folder), 5)
    on_first(lambda: spoil(folder / "host2/checkpoints/step-00000005/__1_0.distcp"))
    on_first(lambda: spoil(folder / "host0/checkpoints/step-00000005/__0_0.distcp"))
    assert loaded(store(folder)) == (5, "")

    # It was flipped in all copies: the step before is taken, by all ranks.
    save(store(folder), 6)
    on_first(lambda: spoil(folder / "host0/checkpoints/step-00000006/__2_0.distcp"))
    on_first(lambda: spoil(folder / "host2/checkpoints/step-00000006/__2_0.distcp"))
    step, notes = loaded(store(folder))
    assert step == 5
    if rank() == 0:
        assert "step-00000006 is skipped: no host has a good __2_0.distcp" in notes


def saves_are_interrupted(folder: Path) -> None:
    save(store(folder), 1)
    save(store(folder), 2)
    steps = {host: folder / f"host{host}/checkpoints/step-00000002" for host in IN_ORDER}

    # A host was killed before its rename: the step is taken up, for it is whole there.
    on_first(lambda: steps[1].rename(steps[1].with_suffix(".tmp")))
    assert loaded(store(folder), state(2)) == (2, "")

    # Two hosts have nothing of the last step: one copy is too few for that.
    on_first(lambda: shutil.rmtree(steps[1]))
    on_first(lambda: shutil.rmtree(steps[2]))
    assert loaded(store(folder), state(2))[0] == 1
    # The next save replaces what is left, and the parts of both never mix.
    checkpoints = store(folder)
    save(checkpoints, 2)
    assert loaded(store(folder)) == (2, "")

    # A host that cannot write fails the save on every rank; what was there stays.
    blocked = folder / "host1/checkpoints"
    on_first(lambda: blocked.rename(folder / "away"))
    on_first(lambda: blocked.write_text("no directory"))
    with pytest.raises(CheckpointError, match="rank 1: "):
        save(store(folder), 3)
    on_first(blocked.unlink)
    on_first(lambda: (folder / "away").rename(blocked))
    assert loaded(store(folder)) == (2, "")

    # What must be whole is brought to the first host; there a shared disk's code reads it.
    on_first(lambda: remove(folder, 0))
    store(folder).make_whole_on_first_host()
    if rank() == 0:
        assert newest(folder / "host0/checkpoints") == steps[0]
    # A newer step that is good is not overtaken.
    save(store(folder), 3)
    with pytest.raises(CheckpointError, match="good and newer"):
        save(store(folder), 2)


def test_hosts_without_a_shared_disk_lose_nothing_with_one_of_them(tmp_path: Path) -> None:
    world.run(3, _both, tmp_path)


def _both(folder: Path) -> None:
    file_exchange.BUFFER_BYTES = 1  # so that a file goes in several pieces
    saves_and_loses(folder / "losses")
    saves_are_interrupted(folder / "interrupted")
