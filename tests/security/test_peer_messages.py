"""Words of other ranks, which travel over Gloo: no name leads elsewhere, no length takes memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.comm.axis import MOST_MESSAGE_BYTES, all_gather_bytes
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.testing import world
from shoal.train.checkpoint import store
from shoal.train.checkpoint.disk_contents import CheckpointPart
from shoal.train.checkpoint.file_exchange import FileTransfer
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.checkpoint.manifest import told_file
from shoal.train.checkpoint.separate_store import SeparateCheckpoints

ELSEWHERE = [
    "../../planted",
    "/planted",
    "a",
    "",
    "__0_0.distcp/../x",
    "manifest.json",
    "index.json\n",
]
GOOD = {"name": "step-00000007", "sha256": "ab", "listed": [], "held": [], "problem": ""}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_name_of_a_file_that_a_rank_tells_leads_out_of_a_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointError, match="that no checkpoint contains"):
        told_file(name, [1, "ab", ""])
    with pytest.raises(CheckpointError, match="is no file of a checkpoint"):
        FileTransfer(name, 0, 1, 10)
    for key in ("listed", "held"):
        with pytest.raises(CheckpointError, match="what is no checkpoint"):
            CheckpointPart.from_json({**GOOD, key: ["__0_0.distcp", name]})


@pytest.mark.parametrize(
    "fields",
    [{"name": "../step-00000007"}, {"name": "/"}, {"name": "step-7"}, {"sha256": "../x"}],
)
def test_no_name_of_a_checkpoint_that_a_rank_tells_leads_out_of_the_run(
    fields: dict[str, str],
) -> None:
    assert CheckpointPart.from_json(GOOD).name == "step-00000007"
    with pytest.raises(CheckpointError, match="what is no checkpoint"):
        CheckpointPart.from_json({**GOOD, **fields})


@pytest.mark.parametrize("fields", [[-1, "", ""], ["1", "", ""], [1, "../x", ""], [1], {}, 7])
def test_what_describes_no_file_is_refused(fields: object) -> None:
    with pytest.raises(CheckpointError, match="that no checkpoint contains"):
        told_file("__0_0.distcp", fields)


def tells_of_a_file_elsewhere(folder: Path) -> None:
    rank = dist.get_rank()
    home = folder / f"host{rank}"
    checkpoints = SeparateCheckpoints(home / "checkpoints", HostDisks((0, 1)))
    if rank == 1:
        home.mkdir(parents=True)
        (home / "planted").write_text("code")
    original = store._as_json

    def hostile(*words):  # type: ignore[no-untyped-def]
        share = original(*words)
        if rank == 1:
            share["files"] = {"../../planted": (4, "", "")}
        return share

    with patch.object(store, "_as_json", hostile), pytest.raises(CheckpointError):
        checkpoints.save(1, {"weight": torch.ones(3)}, {}, {"own": torch.ones(1)})
    dist.barrier()
    assert (home / "planted").exists() == (rank == 1)


def tells_of_a_message_without_end() -> None:
    lies = [MOST_MESSAGE_BYTES + 1, 1 << 62, -1]
    for length in lies:
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveFailed, match="rank 1 of a group tells of a message"):
                all_gather_bytes(b"word", 2, torch.device("cpu"), None)
        else:
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(lengths, torch.tensor([length]))


def hostile_words(folder: Path) -> None:
    tells_of_a_message_without_end()
    tells_of_a_file_elsewhere(folder)


def test_a_rank_whose_words_were_altered_writes_no_file_and_takes_no_memory(
    tmp_path: Path,
) -> None:
    world.run(2, hostile_words, tmp_path)
