"""A run's whole model as one file, and a run that starts from such a file."""

import json
import math
import os
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint_store import data_file, flip_a_bit
from tiny_jobs import GPT, MLP, tiny

from shoal.checkpoint import Checkpoints, tensor_files
from shoal.cli import main
from shoal.errors import CheckpointError, ConfigError, UsageError
from shoal.testing import world
from shoal.train.build import build, load_weights
from shoal.train.weight_export import export

DATA = str(tiny_jobs.DATA)


def trained(
    folder: Path, strategy: str = "single", ranks: int = 1, *parts: dict[str, object]
) -> Path:
    job = tiny(folder / "run", *parts, strategy=strategy)
    if ranks == 1:
        tiny_jobs.trains(job)
    else:
        world.run(ranks, tiny_jobs.trains, job)
    return folder / "run"


def stored(run: Path, prefix: str) -> dict[str, torch.Tensor]:
    saved = Checkpoints(run / "checkpoints").load(pytest.fail)
    assert saved is not None
    return {
        name.removeprefix(prefix): t for name, t in saved.tensors.items() if name.startswith(prefix)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", 3), ("zero2,hybrid=2", 4)])
def test_the_model_is_written_whole_whatever_has_saved_it(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    run = trained(tmp_path, strategy, ranks, MLP)
    done = export(run, tmp_path / "model.safetensors")
    found, expected = load_file(tmp_path / "model.safetensors"), stored(run, "model.")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (done.tensors, done.from_ema) == (len(expected), False)
    assert done.size_bytes == os.path.getsize(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "run": "job", "step": "12"}
    assert not (tmp_path / "model.safetensors.tmp").exists()


@pytest.mark.slow
def test_a_moving_average_is_what_is_written_where_there_is_one(tmp_path: Path) -> None:
    run = trained(tmp_path, "zero1", 2, GPT)
    assert export(run, tmp_path / "model.safetensors").from_ema
    found = load_file(tmp_path / "model.safetensors")
    for name, value in stored(run, "ema.").items():
        assert torch.equal(found[name], value)
    assert found.keys() == stored(run, "model.").keys()


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("pipeline=2", 2),
        *(pytest.param(s, n, marks=pytest.mark.slow) for s, n in (("single", 1), ("zero3", 2))),
    ],
)
def test_the_average_of_a_tied_weight_is_written_under_both_names(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    run = trained(tmp_path, strategy, ranks, GPT)
    export(run, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    average = stored(run, "ema.")["token_embedding.weight"]
    assert not torch.equal(average, stored(run, "model.")["token_embedding.weight"])
    assert torch.equal(found["token_embedding.weight"], average)
    assert torch.equal(found["head.weight"], average)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", 2), ("ddp", 2)])
def test_little_of_the_checkpoint_is_mapped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int
) -> None:
    run = trained(
        tmp_path,
        strategy,
        ranks,
        MLP,
        {"model.options.hidden": [1024, 1024, 1024], "train.epochs": 1},
    )
    export(run, tmp_path / "model.safetensors")  # whatever is imported on the way is now
    monkeypatch.setattr(tensor_files, "MAPPED_BYTES", 1 << 20)
    opened, opens = tensor_files._open, list[weakref.ref[Any]]()

    class Watched:
        """A file that can be referred to weakly."""

        def __init__(self, file: Any) -> None:
            self.get_slice, self.get_tensor = file.get_slice, file.get_tensor

    def watched(path: Path) -> Watched:
        assert sum(file() is not None for file in opens) <= 1, "the file before, and no more"
        if not opens:
            tracemalloc.reset_peak()  # threads have compared digests, each with a buffer
        file = Watched(opened(path))
        opens.append(weakref.ref(file))
        return file

    monkeypatch.setattr(tensor_files, "_open", watched)
    tracemalloc.start()
    export(run, tmp_path / "model.safetensors")
    _, python_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opens) > ranks, "files are mapped anew"
    assert python_bytes < 1.5 * 2**20  # the buffer of the file that is written; no copy of a piece


@pytest.mark.slow
def test_a_run_starts_from_what_was_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(tmp_path / "first", "zero3", 2, MLP)
    file = tmp_path / "model.safetensors"
    export(first, file)
    # With a rate of almost nothing, the first evaluation of the new run is the last one of the old.
    config = tmp_path / "job.yaml"
    config.write_text((first / "config.yaml").read_text())
    words = [
        "train",
        str(config),
        "--weights",
        str(file),
        "--out",
        str(tmp_path / "second"),
        "--optimizer.lr",
        "1e-30",
    ]
    with pytest.raises(SystemExit) as end:
        main([*words, "--strategy", "single", "--train.epochs", "1"])
    assert end.value.code == 0
    capsys.readouterr()
    evaluations = [
        [
            json.loads(line)["loss"]
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if "top5" in line
        ]
        for run in (first, tmp_path / "second")
    ]
    assert evaluations[1][-1] == pytest.approx(evaluations[0][-1], rel=1e-6)


@pytest.mark.slow
def test_a_model_that_is_filled_late_trains_the_same_in_shards(tmp_path: Path) -> None:
    empty = {**MLP, "model.empty": True}
    on_one, in_shards, at_once = (
        stored(trained(tmp_path / name, name, ranks, job), "model.")
        for name, ranks, job in (("single", 1, empty), ("zero3", 2, empty), ("ddp", 1, MLP))
    )
    for name, weight in on_one.items():
        torch.testing.assert_close(in_shards[name], weight, rtol=0, atol=1e-5)
        assert not torch.equal(at_once[name], weight)


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "single", 1, MLP)
    with pytest.raises(SystemExit) as end:
        main(
            ["export", str(run), "-o", str(tmp_path / "model.safetensors"), "--checkpoint", "best"]
        )
    assert end.value.code == 0
    assert f"{tmp_path}/model.safetensors: weights of step" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "single", 1, MLP)
    flip_a_bit(data_file(run / "checkpoints", 12))
    capsys.readouterr()
    assert export(run, tmp_path / "model.safetensors").step < 12
    assert "note: checkpoint step-00000012 is skipped: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single", 1), pytest.param("zero3", 2, marks=pytest.mark.slow)]
)
def test_a_directory_has_the_hubs_form_and_begins_another_run(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    run, hub = trained(tmp_path, strategy, ranks, GPT), tmp_path / "hub"
    done = export(run, hub, dtype="bf16", max_shard_bytes=300)
    export(run, tmp_path / "model.safetensors")
    whole = load_file(tmp_path / "model.safetensors")
    del whole["head.weight"]  # tied: the Hub has one name
    index = json.loads((hub / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    assert (done.files, done.tensors) == (len(set(index["weight_map"].values())), len(whole))
    parts = {file.name: load_file(file) for file in hub.glob("*.safetensors")}
    assert sorted(parts) == [
        f"model-{i:05d}-of-{done.files:05d}.safetensors" for i in range(1, done.files + 1)
    ]
    assert done.files > 2
    assert sum(file.stat().st_size for file in hub.glob("*.safetensors")) == done.size_bytes
    # A tensor that is larger than a shard has its own.
    sizes = [[t.numel() * 2 for t in part.values()] for part in parts.values()]
    assert all(len(part) == 1 or sum(part) <= 300 for part in sizes)
    assert max(map(sum, sizes)) > 300
    for name, file in index["weight_map"].items():
        assert torch.equal(parts[file][name], whole[name].bfloat16())
    built = build(tiny(tmp_path / "next", GPT, model__weights=str(hub)), torch.device("cpu"))
    state = built.model.state_dict()
    assert all(torch.equal(state[n], t.bfloat16().float()) for n, t in whole.items())
    assert built.model.get_parameter("head.weight") is built.model.get_parameter(
        "token_embedding.weight"
    )


def test_the_library_of_the_hub_reads_it(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    run = trained(tmp_path, "single", 1, GPT)
    for place, size in (("one", None), ("several", 300)):
        export(run, tmp_path / place, max_shard_bytes=size)
        model = build(tiny(tmp_path / "next", GPT), torch.device("cpu")).model
        found = hub.load_torch_model(model, tmp_path / place, strict=False)
        assert found.missing_keys in ([], ["head.weight"])  # of the tied pair
        assert found.unexpected_keys == []
        export(run, tmp_path / f"{place}.safetensors")
        for name, value in load_file(tmp_path / f"{place}.safetensors").items():
            assert torch.equal(model.state_dict()[name], value)
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["model.safetensors"]


def test_only_floating_point_is_converted_and_what_overflows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: large\n")
    tensors = {"weight": torch.tensor([1.0, -7e4, math.inf]), "steps": torch.tensor([1 << 40])}
    saved = {f"model.{name}": value for name, value in tensors.items()}
    Checkpoints(tmp_path / "checkpoints").save(1, saved, {}, {})
    with pytest.raises(CheckpointError, match=r"^weight has the value -70000, .* end at 65504\."):
        export(tmp_path, tmp_path / "hub", dtype="fp16")
    assert not [*(tmp_path / "hub").iterdir()]
    export(tmp_path, tmp_path / "hub", dtype="bf16")  # keeps an infinite value
    found = load_file(tmp_path / "hub/model.safetensors")
    assert torch.equal(found["weight"], tensors["weight"].bfloat16())
    assert torch.equal(found["steps"], tensors["steps"])


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    run, hub = trained(tmp_path, "single", 1, MLP), tmp_path / "hub.v1"
    with pytest.raises(UsageError, match=r"several files; name a directory, -o .*/model\.$"):
        export(run, tmp_path / "model.safetensors", max_shard_bytes=300)
    with pytest.raises(UsageError, match="or name a directory that is there"):
        export(run, hub)
    (hub / "model-00002-of-00002.safetensors.tmp").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"hub\.v1 was not written: Is a directory"):
        export(run, hub, max_shard_bytes=300)
    assert len([*hub.iterdir()]) == 1
    (hub / "model-00002-of-00002.safetensors.tmp").rmdir()
    assert export(run, hub, max_shard_bytes=300).files == 2
    with pytest.raises(UsageError, match=r"it has weights, model-00001-of-00002\.safetensors"):
        export(run, hub)


def test_what_cannot_be_exported_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        export(tmp_path, tmp_path / "model.safetensors")
    run = trained(tmp_path, "single", 1, MLP)
    with pytest.raises(UsageError, match=r"name it .*/model\.safetensors"):
        export(run, tmp_path / "model.pt")
    with pytest.raises(
        UsageError, match=r"there is no directory .*nowhere\. Make it, or give another -o"
    ):
        export(run, tmp_path / "nowhere/model.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    with pytest.raises(
        CheckpointError, match=r"directory\.safetensors was not written: Is a directory\. "
    ):
        export(run, tmp_path / "directory.safetensors")
    (tmp_path / "directory.safetensors").rmdir()
    for step in (9, 12):
        flip_a_bit(data_file(run / "checkpoints", step))
    for path in (run / "checkpoints").glob("step-*"):
        if path.name not in ("step-00000009", "step-00000012"):
            flip_a_bit(data_file(run / "checkpoints", int(path.name[-8:])))
    with pytest.raises(CheckpointError, match="was altered"):
        export(run, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_rounded_weights_are_noted_and_another_kind_of_dtype_refused(
    tmp_path: Path, suffix: str
) -> None:
    model, file = torch.nn.BatchNorm1d(2), tmp_path / f"model{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    wide = torch.nn.BatchNorm1d(2).double()
    save(wide.state_dict(), file)
    assert load_weights(model, str(file)) == [
        f"model.weights: 4 of 5 tensors are torch.float64 in {file} and were rounded to "
        "torch.float32"
    ]
    assert load_weights(wide, str(file)) == []
    save(torch.nn.BatchNorm1d(2).half().state_dict(), file)
    assert load_weights(model, str(file)) == []  # float32 holds all that float16 does
    save({**model.state_dict(), "bias": torch.zeros(2, dtype=torch.int64)}, file)
    with pytest.raises(ConfigError, match=r"bias is torch\.int64; the model's is torch\.float32"):
        load_weights(model, str(file))


def test_an_import_says_what_it_rounds_and_keeps_all_of_float64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.pt"
    narrow = tiny(tmp_path / "narrow", MLP, model__weights=str(file))
    wide = tiny(tmp_path / "wide", MLP, model__weights=str(file), train__precision="fp64")
    state = build(tiny(tmp_path / "run", MLP), torch.device("cpu")).model.double().state_dict()
    state = {name: value + 1e-12 for name, value in state.items()}
    torch.save(state, file)
    found = build(wide, torch.device("cpu"))
    assert all(torch.equal(value, state[name]) for name, value in found.model.state_dict().items())
    tiny_jobs.trains(narrow)
    assert "note: model.weights: 4 of 4 tensors are torch.float64" in capsys.readouterr().err


def test_weights_of_old_files_without_counters_of_batches_are_taken(tmp_path: Path) -> None:
    model, file = torch.nn.BatchNorm1d(2), tmp_path / "model.pt"
    torch.nn.init.constant_(model.weight, 3.0)
    torch.save({k: v for k, v in model.state_dict().items() if v.dim()}, file)
    loaded = torch.nn.BatchNorm1d(2)
    assert load_weights(loaded, str(file)) == []
    assert loaded.weight.tolist() == [3.0, 3.0]


def test_a_torch_file_that_is_torn_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    model, file = torch.nn.Linear(2, 2), tmp_path / "model.pt"
    for zipped in (True, False):
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=zipped)
        whole = file.read_bytes()
        for size in (0, 5, 30, 500, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(ConfigError, match=r"model\.pt is damaged, or no torch file: \S"):
                load_weights(model, str(file))


def test_a_file_without_weights_is_refused_without_advice_to_run_it(
    tmp_path: Path,
) -> None:
    model, file = torch.nn.Linear(2, 2), tmp_path / "model.pt"
    file.write_text("model:\n  name: mlp\n")
    with pytest.raises(ConfigError, match="is not a torch or safetensors file") as text:
        load_weights(model, str(file))
    torch.save(model, file)
    with pytest.raises(
        ConfigError, match=r"holds torch\.nn\S*Linear, and tensors alone are read"
    ) as module:
        load_weights(model, str(file))
    assert "weights_only" not in f"{text.value} {module.value}"
