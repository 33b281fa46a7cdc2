"""The digest of large files: any single change is found, and the pieces of writes do not count."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_store import data_file, filled, flip_a_bit, saved

from shoal.train.checkpoint import block_digest, manifest
from shoal.train.checkpoint.block_digest import BLOCK_BYTES, BlockDigest


def digest_of(*pieces: bytes) -> str:
    digest = BlockDigest()
    for piece in pieces:
        digest.update(memoryview(piece))
    return digest.hexdigest()


def test_pieces_do_not_count_and_lengths_do() -> None:
    data = random.Random(1).randbytes(2 * BLOCK_BYTES + 77)
    expected = digest_of(data)
    assert len(expected) == 32
    for cut in (1, 1000, BLOCK_BYTES, BLOCK_BYTES + 3):
        assert digest_of(data[:cut], data[cut:]) == expected
    assert len({digest_of(bytes(count)) for count in (0, 1, 7, 8, 9, BLOCK_BYTES)}) == 6


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(3 * BLOCK_BYTES + 5)
    (tmp_path / "file").write_bytes(data)
    digest = BlockDigest()
    with (tmp_path / "file").open("rb", buffering=0) as file:
        digest.read(file)
    assert digest.hexdigest() == digest_of(data)


def test_it_is_the_same_in_every_version_as_checkpoints_hold_it() -> None:
    assert digest_of(b"shoal") == "81a94a2c874393e6662890e7098f1291"


def test_compiled_sums_are_those_of_torch_wherever_a_block_begins() -> None:
    if block_digest.compiled is None:
        pytest.skip("the compiled part of Shoal is not there")
    data = np.frombuffer(random.Random(4).randbytes(BLOCK_BYTES + 8), np.uint8)
    for begin in range(8):
        block = data[begin : begin + BLOCK_BYTES]
        expected = [value % (1 << 64) for value in block_digest.sums_by_torch(block)]
        found = block_digest.compiled.block_sums(block, *block_digest.factors())
        assert list(found) == expected


def test_compiled_sums_take_no_buffers_of_different_lengths() -> None:
    if block_digest.compiled is None:
        pytest.skip("the compiled part of Shoal is not there")
    with pytest.raises(ValueError, match="one length"):
        block_digest.compiled.block_sums(bytes(16), bytes(16), bytes(8))


def test_flipped_bits_swapped_words_and_equal_flips_in_two_words_are_found() -> None:
    random_ = random.Random(2)
    data = random_.randbytes(BLOCK_BYTES + 4096)
    expected = digest_of(data)
    for _ in range(60):
        changed = bytearray(data)
        bit = random_.randrange(8 * len(data))
        changed[bit // 8] ^= 1 << bit % 8
        assert digest_of(bytes(changed)) != expected
        other = random_.randrange(0, len(data) - 8, 8)  # the same bit of another word
        changed[other + bit // 8 % 8] ^= 1 << bit % 8
        assert bytes(changed) == data or digest_of(bytes(changed)) != expected
    signs = bytearray(data)
    signs[7] ^= 128
    signs[15] ^= 128
    assert digest_of(bytes(signs)) != expected
    assert digest_of(data[8:16] + data[:8] + data[16:]) != expected
    assert digest_of(data[:4096], bytes(4096), data[8192:]) != expected


def test_a_checkpoint_of_format_1_with_sha256_alone_is_verified_and_read(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    contents = manifest.read(path)
    files = {
        name: manifest.StoredFile(
            stored.size_bytes, hashlib.sha256((path / name).read_bytes()).hexdigest()
        )
        for name, stored in contents.files.items()
    }
    manifest.write(path, replace(contents, files=files, format=1))
    assert manifest.problems(path) == []
    loaded = store.load(print)
    assert loaded is not None
    assert loaded.tensors["weight"].equal(filled(1)["weight"])
    flip_a_bit(data_file(tmp_path, 1))
    assert "SHA-256" in manifest.problems(path)[0]
