"""Words of other ranks, which travel over Gloo: no name leads elsewhere, no length takes memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import Checkpoints, tensor_files
from shoal.checkpoint.manifest import told_file
from shoal.comm.axis import MOST_MESSAGE_BYTES, all_gather_bytes
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.testing import world

ELSEWHERE = [
    "../../planted",
    "/planted",
    "a",
    "",
    "rank-00000.safetensors/../x",
    "manifest.json",
    "index.json\n",
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_name_of_a_file_that_a_rank_tells_leads_out_of_a_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointError, match="that no checkpoint contains"):
        told_file([name, 1, DIGEST])


NAME, DIGEST = "rank-00000.safetensors", 32 * "a"


@pytest.mark.parametrize(
    "fields",
    [[NAME, -1, DIGEST], [NAME, "1", DIGEST], [NAME, 1, "../x"], [NAME, 1], [1, 1, DIGEST], {}, 7],
)
def test_what_describes_no_file_is_refused(fields: object) -> None:
    assert told_file([NAME, 1, DIGEST])[0] == NAME
    with pytest.raises(CheckpointError, match="that no checkpoint contains"):
        told_file(fields)


def tells_of_a_file_elsewhere(folder: Path) -> None:
    rank = dist.get_rank()
    checkpoints = Checkpoints(folder / "checkpoints")
    if rank == 1:
        (folder / "planted").write_text("code")
    original = tensor_files.write

    def hostile(*words):  # type: ignore[no-untyped-def]
        told = original(*words)
        return [("../../planted", 4, DIGEST)] if rank == 1 else told

    with patch.object(tensor_files, "write", hostile), pytest.raises(CheckpointError):
        checkpoints.save(1, {"weight": torch.ones(3)}, {}, {"own": torch.ones(1)})
    dist.barrier()
    assert (folder / "planted").read_text() == "code"
    assert list((folder / "checkpoints").iterdir()) == []


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
