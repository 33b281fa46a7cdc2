"""Files that are made to cost time or memory, and pickles that are made to run code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash

from shoal.checkpoint import Checkpoints, manifest, tensor_files
from shoal.errors import CheckpointError

DEEP = {
    "open brackets": "a: " + "[" * 60_000,
    "closed brackets": "a: " + "[" * 30_000 + "]" * 30_000,
    "indents": "\n".join(" " * depth + "a:" for depth in range(350)),
    "dashes": "- " * 30_000,
    "aliases of aliases": "".join(
        f"k{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10) if i else '1'}]\n" for i in range(12)
    ),
    "a long list often": f"a: &a [{','.join('1' * 100)}]\nb: [{','.join(['*a'] * 15_000)}]",
    "many values": f"a: [{','.join('1' * 32_000)}]",
    "many keys": "".join(f"k{i}: 1\n" for i in range(7_000)),
    "too long": "# " + "x" * 70_000,
}
READS = """
import resource, sys, time
from pathlib import Path
from shoal.config.layers import load
from shoal.errors import ConfigError
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
for name in sys.argv[1:]:
    try:
        load(Path(name))
    except ConfigError as error:
        print(len(str(error)) < 400)
    else:
        print("many" in name)
# Not ru_maxrss, which a process inherits.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) < 100 << 10)
"""


@pytest.mark.slow
def test_64_kib_of_yaml_take_neither_seconds_nor_memory(tmp_path: Path) -> None:
    files = []
    for name, text in DEEP.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", READS, *map(str, files)], check=True, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["True"] * (len(DEEP) + 1)


def saved(directory: Path) -> tuple[Checkpoints, Path]:
    store = Checkpoints(directory)
    return store, store.save(1, {"w": torch.arange(6.0)}, {"a": 1})


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_pipe_or_a_sparse_terabyte_in_a_checkpoint_is_refused_at_once(
    tmp_path: Path, name: str
) -> None:
    _, path = saved(tmp_path / "c")
    begun = time.monotonic()
    (path / name).unlink()
    os.mkfifo(path / name)
    assert manifest.problems(path)
    (path / name).unlink()
    with (path / name).open("wb") as file:
        file.truncate(1 << 40)
    (problem,) = manifest.problems(path)
    assert "bytes" in problem
    assert time.monotonic() - begun < 10


def test_a_manifest_may_not_lead_out_of_its_checkpoint(tmp_path: Path) -> None:
    _, path = saved(tmp_path / "c")
    read = manifest.read(path)
    outside = {"../../outside": next(iter(read.files.values()))}
    (tmp_path / "outside").write_text("x")
    manifest.write(path, manifest.Manifest(1, 1, {**read.files, **outside}, read.info))
    assert "which no checkpoint contains" in "".join(manifest.problems(path))


def test_hints_that_are_pipes_are_not_waited_for(tmp_path: Path) -> None:
    store, path = saved(tmp_path / "c")
    hint = path.parent / "latest"
    hint.unlink()
    os.mkfifo(hint)
    reports: list[str] = []
    loaded = store.load(reports.append)
    assert loaded is not None
    assert reports == [f"{hint} names no checkpoint"]


def test_a_pickle_in_the_place_of_any_file_is_not_run_even_if_the_manifest_vouches_for_it(
    tmp_path: Path,
) -> None:
    bomb = f"cposix\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR.".encode()
    for name in ("index.json", "rank-00000.safetensors"):
        store, path = saved(tmp_path / name)
        read = manifest.read(path)
        (path / name).write_bytes(bomb)
        entry = manifest.StoredFile(len(bomb), xxhash.xxh3_128(bomb).hexdigest())
        (path / "manifest.json").unlink()
        manifest.write(path, manifest.Manifest(1, 1, {**read.files, name: entry}, read.info))
        assert not manifest.problems(path)
        with pytest.raises(CheckpointError, match="cannot be read"):
            store.load(pytest.fail)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "load"),
        ("dtype", ["float32"]),
        ("shape", [-6]),
        ("shape", [1 << 62]),
        ("shape", [True]),
        ("shape", "6"),
        ("file", "../../../etc/passwd"),
        ("file", "/etc/passwd"),
        ("offsets", [3]),
        ("offsets", []),
        ("chunks", None),
        ("chunks", []),
    ],
)
def test_an_index_that_is_none_is_refused_by_one_error(
    tmp_path: Path, field: str, value: object
) -> None:
    _, path = saved(tmp_path / "c")
    document = json.loads((path / "index.json").read_text())
    entry = document["tensors"]["w"]
    (entry if field in ("dtype", "shape", "chunks") else entry["chunks"][0])[field] = value
    (path / "index.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError):
        tensor_files.read(path, lambda _: True)
