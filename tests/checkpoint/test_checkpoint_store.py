"""Saving and loading in one process: what comes back, what stays and what goes."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.checkpoint import Checkpoints, newest, read_info
from shoal.checkpoint.manifest import name_of, step_of, to_text
from shoal.checkpoint.store import info_problems
from shoal.errors import CheckpointError, CleanupFailed, UsageError


def filled(step: int) -> dict[str, Tensor]:
    return {"weight": torch.full((40, 5), float(step)), "count": torch.tensor(step)}


def saved(directory: Path, *steps: int, keep: int = 9) -> Checkpoints:
    store = Checkpoints(directory, keep)
    for step in steps:
        store.save(step, filled(step), {"step": step})
    return store


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def data_file(directory: Path, step: int) -> Path:
    return directory / name_of(step) / "rank-00000.safetensors"


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


# -- what goes in comes out --

TENSORS = {
    "scalar": torch.tensor(3),
    "bools": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "integers": torch.tensor([[-(2**62)], [2**62]]),
    "brain": torch.tensor([1.1, -2.7e30, math.inf]).bfloat16(),
    "half": torch.tensor([1.1, 2.2]).half(),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "complex": torch.tensor(1 + 2j),
    "wide complex": torch.arange(6).reshape(2, 3).to(torch.complex128) * (1 + 0.1j),
    "unsigned": torch.tensor([1, 60000], dtype=torch.uint16),
    "eight bits": torch.tensor([1.5, -3.0]).to(torch.float8_e4m3fn),
    "nothing": torch.empty(0, 3),
    "transposed": torch.arange(20.0).reshape(4, 5).t(),
    "every.second": torch.arange(10.0)[::2],
    "expanded": torch.ones(1).expand(4),
    "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "module.0.weight/with a slash": torch.nn.Parameter(torch.arange(3.0)),
    "nan": torch.tensor([math.nan, -0.0]),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c")
    store.save(7, TENSORS, {}, private={"generator": torch.get_rng_state()})
    loaded = store.load(pytest.fail)
    assert loaded is not None
    assert (loaded.step, loaded.path) == (7, tmp_path / "c" / "step-00000007")
    assert loaded.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        back = loaded.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(back), bits(tensor.detach())), name
        assert (back.is_contiguous(), back.requires_grad, back.device.type) == (True, False, "cpu")
    assert torch.equal(loaded.private["generator"], torch.get_rng_state())
    assert math.copysign(1, loaded.tensors["nan"][1]) == -1


def test_saving_draws_no_random_number(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    saved(tmp_path / "c", 1)
    assert torch.equal(torch.get_rng_state(), before)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(JSON)
def test_every_number_in_info_comes_back_exactly(value: object) -> None:
    assert info_problems(value, "info") == []
    assert repr(json.loads(to_text(value))) == repr(value)


def test_info_comes_back_with_its_keys_in_order(tmp_path: Path) -> None:
    info = {
        "z": 0.1 + 0.2,
        "a": [math.nan, -math.inf, 5e-324],
        "betas": (0.9, 0.999),
        "none": None,
        "big": 2**80,
    }
    path = Checkpoints(tmp_path / "c").save(1, filled(1), info)
    assert repr(read_info(path)) == repr({**info, "betas": [0.9, 0.999]})


def test_all_misuse_is_named_at_once(tmp_path: Path) -> None:
    info = {"lr": torch.tensor(0.1), "milestones": {30: "a"}}
    checkpoints = Checkpoints(tmp_path / "c")
    with pytest.raises(UsageError) as caught:
        checkpoints.save(
            -1, {"rank0/x": torch.ones(1), "__metadata__": torch.ones(1), "y": 3}, info
        )  # type: ignore[dict-item]
    for part in (
        "-1",
        "info['lr']: a Tensor",
        "info['milestones']: the key 30",
        "'__metadata__': this name is reserved",
        "'rank0/x'",
        "'y' is a int",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "c").exists()
    with pytest.raises(UsageError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


# -- what is loaded --


def test_nothing_is_loaded_where_nothing_was_saved(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load(pytest.fail) is None
    assert newest(tmp_path / "none") is None
    (tmp_path / "c" / "step-00000001.tmp").mkdir(parents=True)
    assert Checkpoints(tmp_path / "c").load(pytest.fail) is None


def test_newest_best_or_a_given_step_can_be_loaded(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1, 5)
    store.save(99_999_999, filled(6), {}, best=True)
    store.save(123_456_789, filled(7), {})
    for which, step in (("latest", 123_456_789), ("best", 99_999_999), (5, 5)):
        loaded = store.load(pytest.fail, which)
        assert loaded is not None
        assert loaded.step == step
    assert newest(tmp_path / "c") == tmp_path / "c" / "step-123456789"
    with pytest.raises(
        CheckpointError, match=r"step-00000004 is not there; there are: .*step-00000001"
    ):
        store.load(pytest.fail, 4)


def test_best_needs_a_mark(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best"):
        saved(tmp_path / "c", 1).load(pytest.fail, which="best")


def test_a_checkpoint_copied_elsewhere_loads(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    shutil.rmtree(tmp_path / "c")
    assert Checkpoints(tmp_path / "copy").load(pytest.fail) is not None


# -- what stays and what goes --


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c", keep=2)
    for step in range(1, 7):
        store.save(step, filled(step), {}, best=step == 2)
    assert names(tmp_path / "c") == [
        "best",
        "latest",
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]
    store.save(7, filled(7), {}, best=True)
    assert names(tmp_path / "c") == ["best", "latest", "step-00000006", "step-00000007"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, 3)
    flip_a_bit(data_file(tmp_path / "c", 3))
    saved(tmp_path / "c", 4, keep=2)
    assert [name for name in names(tmp_path / "c") if step_of(name)] == [
        name_of(step) for step in (2, 3, 4)
    ]


def test_what_dead_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for leftover in ("step-00000003.tmp", "step-00000004.tmp"):
        (tmp_path / "c" / leftover).mkdir(parents=True)
        (tmp_path / "c" / leftover / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "c" / "latest.tmp").touch()
    (tmp_path / "c" / "notes.tmp").touch()
    (tmp_path / "c" / "step-3").mkdir()
    saved(tmp_path / "c", 3)
    assert names(tmp_path / "c") == ["latest", "notes.tmp", "step-00000003", "step-3"]


def test_a_good_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1, 2)
    before = data_file(tmp_path / "c", 2).stat()
    assert store.save(2, filled(2), {"step": 2}, best=True) == tmp_path / "c" / name_of(2)
    assert (tmp_path / "c" / "best").read_text() == "step-00000002\n"
    with pytest.raises(CheckpointError, match=r"has another info; .* Save once after a step"):
        store.save(2, filled(2), {"step": "two"})
    with pytest.raises(CheckpointError, match="step-00000002 is there, good and newer"):
        store.save(1, filled(1), {})
    assert data_file(tmp_path / "c", 2).stat() == before


def test_damaged_checkpoints_in_the_way_are_replaced(tmp_path: Path) -> None:
    store = saved(tmp_path / "c", 1, 2, 3)
    truncate(data_file(tmp_path / "c", 2))
    truncate(data_file(tmp_path / "c", 3))
    reports: list[str] = []
    store = Checkpoints(tmp_path / "c")
    store.load(reports.append)
    assert len(reports) == 2
    store.save(2, filled(20), {"again": True})
    store.save(3, filled(30), {"again": True})
    for step in (2, 3):
        loaded = store.load(pytest.fail, step)
        assert loaded is not None
        assert loaded.tensors["count"] == 10 * step


def test_a_best_one_that_could_not_be_marked_is_marked_by_the_next_save(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c", keep=1)
    store.save(1, filled(1), {}, best=True)
    (tmp_path / "c" / "best.tmp").mkdir()  # stands where the new hint is written first
    with pytest.raises(
        CleanupFailed,
        match=r"step 2 was saved, but not all that follows was done:.*\n.*IsADirectory",
    ):
        store.save(2, filled(2), {}, best=True)
    (tmp_path / "c" / "best.tmp").rmdir()
    store.save(3, filled(3), {})
    assert names(tmp_path / "c") == ["best", "latest", "step-00000002", "step-00000003"]
    assert (tmp_path / "c" / "best").read_text() == "step-00000002\n"


def test_a_run_that_goes_on_marks_the_best_one_if_it_is_there(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2)
    store = Checkpoints(tmp_path / "c")
    store.complete(2, best=7)
    assert not (tmp_path / "c" / "best").exists()
    store.complete(2, best=1)
    assert (tmp_path / "c" / "best").read_text() == "step-00000001\n"
