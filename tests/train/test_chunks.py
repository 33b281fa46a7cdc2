"""Tensors of every cut, as they lie in a checkpoint's files."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.errors import CheckpointError
from shoal.testing import world
from shoal.train.checkpoint import tensor_files, tensor_index
from shoal.train.checkpoint.chunks import TensorEntry
from shoal.train.checkpoint.rank_consensus import RankConsensus
from shoal.train.checkpoint.tensor_index import stored


def whole() -> dict[str, Tensor]:
    numbers = torch.arange(7 * 6 * 5, dtype=torch.float32)
    return {
        "rows": numbers.reshape(7, 30),
        "few rows": numbers[:6].reshape(1, 6),
        "columns": numbers.reshape(7, 6, 5),
        "last": numbers.to(torch.bfloat16).reshape(7, 6, 5),
        "rows and columns": numbers.reshape(7, 6, 5),
        "replicated": numbers.to(torch.float64).reshape(30, 7),
        "number": torch.tensor(3),
        "strided": numbers[:120].reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3),
    }


def _written(directory: Path, tensors: dict[str, Tensor], held: list[Any]) -> dict[str, Any]:
    _, chunks = tensor_files.write(directory, tensors, held)
    return chunks


def save_cut(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cuts = {
        "rows": [Shard(0), Shard(0)],
        "few rows": [Replicate(), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "last": [Shard(2), Replicate()],
        "rows and columns": [Shard(0), Shard(1)],
        "replicated": [Replicate(), Replicate()],
    }
    tensors = {
        name: distribute_tensor(t, mesh, cuts[name]) if name in cuts else t
        for name, t in whole().items()
    }
    consensus = RankConsensus()
    held = consensus.all_gather_objects(tensor_files.held_chunks(tensors))
    shares = consensus.all_gather_objects(_written(directory, tensors, held))
    if dist.get_rank() == 0:
        tensor_index.write(directory, held, shares)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut")
    world.run(4, save_cut, path)
    return path


def laid_out(tensor: TensorEntry) -> Tensor:
    """The whole from its pieces; every number is written once."""
    flat, written = (
        torch.empty(tensor.shape.numel(), dtype=tensor.dtype),
        torch.zeros(tensor.shape.numel()),
    )
    for piece in tensor.chunks:
        values, done = piece.read().reshape(-1), 0
        for first, length in piece.runs(tensor.shape):
            flat[first : first + length] = values[done : done + length]
            written[first : first + length] += 1
            done += length
    assert torch.equal(written, torch.ones_like(written))
    return flat.reshape(tensor.shape)


@pytest.mark.parametrize("name", whole())
def test_pieces_of_any_cut_fill_the_whole(directory: Path, name: str) -> None:
    expected, found = whole()[name], stored(directory)[name]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(laid_out(found), expected)


def test_a_tensor_cut_along_its_rows_is_one_run_a_piece(directory: Path) -> None:
    rows = stored(directory)["rows"]
    assert sorted(run for piece in rows.chunks for run in piece.runs(rows.shape)) == [
        (0, 60),
        (60, 60),
        (120, 60),
        (180, 30),
    ]


def test_a_file_that_holds_something_else_is_said(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    # As versions wrote it whose index did not tell where the numbers are.
    piece = replace(stored(copy)["rows"].chunks[0], data_start_bytes=None)
    assert torch.equal(piece.read(), stored(copy)["rows"].chunks[0].read())
    with piece.file.open("r+b") as file:
        file.seek(piece.start_bytes)
        file.write(b"nothing of torch's")
    with pytest.raises(
        CheckpointError, match=f"distcp from byte {piece.start_bytes} on cannot be read"
    ):
        piece.read()
    several = stored(directory)
    other = several["columns"].chunks[0]
    with pytest.raises(CheckpointError, match="its index says otherwise"):
        type(piece)(
            other.offsets, other.shape, torch.int8, other.file, other.start_bytes, other.size_bytes
        ).read()


def test_a_file_that_ends_too_early_is_said(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    piece = stored(copy)["rows"].chunks[0]
    assert piece.data_start_bytes is not None
    os.truncate(piece.file, piece.data_start_bytes + 3)
    for read in (piece.read, piece.mapped):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_tools_of_torch_read_what_was_written(directory: Path) -> None:
    found = {name: torch.full_like(tensor, 7).contiguous() for name, tensor in whole().items()}
    dcp.load(found, checkpoint_id=directory, no_dist=True)
    for name, expected in whole().items():
        assert torch.equal(found[name], expected), name
