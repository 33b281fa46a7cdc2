"""Tensors of every cut, as they lie in a checkpoint's files."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint import tensor_files, tensor_index
from shoal.checkpoint.rank_consensus import RankConsensus
from shoal.checkpoint.tensor_index import TensorEntry, stored
from shoal.errors import CheckpointError
from shoal.testing import world


def whole() -> dict[str, Tensor]:
    numbers = torch.arange(7 * 6 * 5, dtype=torch.float32)
    return {
        "rows": numbers.reshape(7, 30),
        "few rows": numbers[:6].reshape(1, 6),
        "columns": numbers.reshape(7, 6, 5),
        "last": numbers.to(torch.bfloat16).reshape(7, 6, 5),
        "rows and columns": numbers.reshape(7, 6, 5),
        "replicated": numbers.to(torch.float64).reshape(30, 7),
        "complex": numbers.to(torch.complex128).reshape(7, 30),
        "number": torch.tensor(3),
        "strided": numbers[:120].reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3),
    }


def save_cut(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cuts = {
        "rows": [Shard(0), Shard(0)],
        "few rows": [Replicate(), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "last": [Shard(2), Replicate()],
        "rows and columns": [Shard(0), Shard(1)],
        "replicated": [Replicate(), Replicate()],
        "complex": [Shard(0), Replicate()],
    }
    tensors = {
        name: distribute_tensor(t, mesh, cuts[name]) if name in cuts else t
        for name, t in whole().items()
    }
    consensus = RankConsensus()
    held = consensus.gather("held", lambda: tensor_index.held_chunks(tensors))
    assert bool(held) == (dist.get_rank() == 0), "the index is known to rank 0 alone"
    shares = tensor_index.shares(held)
    share = consensus.scatter("share", lambda: shares)
    tensor_files.write(directory, tensors, share)
    dist.barrier()
    if dist.get_rank() == 0:
        tensor_index.write(directory, held, shares)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut")
    world.run(4, save_cut, path)
    return path


def laid_out(name: str, tensor: TensorEntry) -> Tensor:
    """The whole from its pieces; every number is written once."""
    full, written = torch.empty(tensor.shape, dtype=tensor.dtype), torch.zeros(tensor.shape)
    for _, chunk, numbers in tensor_files.blocks([(name, chunk) for chunk in tensor.chunks]):
        ends = map(sum, zip(chunk.offsets, chunk.shape, strict=True))
        place = tuple(map(slice, chunk.offsets, ends))
        full[place] = numbers
        written[place] += 1
    assert torch.equal(written, torch.ones_like(written))
    return full


@pytest.mark.parametrize("name", whole())
def test_pieces_of_any_cut_fill_the_whole(directory: Path, name: str) -> None:
    expected, found = whole()[name], stored(directory)[name]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(laid_out(name, found), expected)
    assert torch.equal(tensor_files.read(directory, lambda key: key == name)[name], expected)


def test_numbers_are_aligned_in_the_file(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        contents = path.read_bytes()
        first = 8 + int.from_bytes(contents[:8], "little")
        assert first % 64 == 0
        header = json.loads(contents[8:first])
        del header["__metadata__"]
        for name, entry in header.items():
            assert entry["data_offsets"][0] % whole()[name].dtype.itemsize == 0


@pytest.mark.parametrize("size_bytes", [0, 5, 100, -3])
def test_a_file_that_ends_too_early_is_said(
    directory: Path, tmp_path: Path, size_bytes: int
) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    path = stored(copy)["rows"].chunks[0].file
    os.truncate(path, size_bytes if size_bytes >= 0 else path.stat().st_size + size_bytes)
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        tensor_files.read(copy, lambda name: name == "rows")


def test_a_file_that_holds_something_else_is_said(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    index = (copy / "index.json").read_text()
    for name, other, complaint in (
        ("number", "count", "does not contain tensor count"),
        ("float64", "int64", r"is \('F64', \[30, 7\]\); its index says \('I64', \[30, 7\]\)"),
    ):
        (copy / "index.json").write_text(index.replace(f'"{name}"', f'"{other}"'))
        with pytest.raises(CheckpointError, match=complaint):
            tensor_files.read(copy, lambda _: True)


READABLE = sorted(whole().keys() - {"complex"})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_was_written(directory: Path) -> None:
    found = {name: torch.full_like(whole()[name], 7).contiguous() for name in READABLE}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    for name in READABLE:
        assert torch.equal(found[name], whole()[name]), name


def test_torch_joins_what_was_written_into_one_file(directory: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    (tmp_path / "joined").mkdir()
    for path in directory.glob("*.safetensors"):
        shutil.copy(path, shards)
    # torch 2.13 knows the sizes of floating-point numbers alone.
    names = [name for name, tensor in whole().items() if tensor.is_floating_point()]
    names.remove("empty")
    places = dict.fromkeys(names, 1)
    consolidate_safetensors_files(str(shards), str(tmp_path / "joined"), places)
    (joined,) = (tmp_path / "joined").glob("*.safetensors")
    found = load_file(joined)
    for name in names:
        assert torch.equal(found[name], whole()[name]), name
