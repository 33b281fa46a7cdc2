"""`shoal plan hf:DIRECTORY`: a model of transformers is planned from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import program
from shoal.platform.optional_packages import is_installed

needs_transformers = pytest.mark.skipif(
    not is_installed("transformers"), reason="pip install shoal[hf]"
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def shoal_plan(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        program.main(["plan", *words])
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@needs_transformers
def test_a_config_is_planned_without_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without --seq: of the 64 tokens that the model takes.
    words = ("-n", "2", "--train.batch_size", "8", "--json")
    assert shoal_plan(f"hf:{folder}", *words) == 0
    read = json.loads(capsys.readouterr().out)["result"]
    attention, mlp = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 96
    assert read["parameters"] == 2 * 100 * 64 + 2 * (attention + mlp + 2 * 64) + 64
    assert read["global_batch"] == 8
    assert read["best"] is not None
    single = {plan["strategy"]: plan["memory"] for plan in read["plans"]}["ddp"]
    assert single["parameters"] == 4 * read["parameters"]
    assert single["optimizer"] > 2 * single["parameters"]  # AdamW


@needs_transformers
@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, (), "has no class NoSuchForCausalLM"),
        ({}, ("--seq", "65"), "--seq 65: the model has 64 positions"),
    ],
    ids=["class", "length"],
)
def test_a_model_that_transformers_cannot_build_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    words: tuple[str, ...],
    message: str,
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | change))
    assert shoal_plan(f"hf:{folder}", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, (), "No such file or directory. Give a directory with config.json, such as"),
        ("{", (), "is no JSON"),
        ("{}", (), "names no model, as in"),
        ('{"architectures": ["ViTForImageClassification"]}', (), "is no language model"),
        ("{}", ("--model.name", "mlp"), "--model.name: no setting of a model of transformers"),
        ("{}", ("--", "--epochs"), "words after --: only for a script"),
    ],
    ids=["absent", "no json", "no model", "images", "setting", "words"],
)
def test_what_is_no_config_of_a_language_model_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    words: tuple[str, ...],
    message: str,
) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert shoal_plan(f"hf:{folder}", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(is_installed("transformers"), reason="transformers is installed")
def test_a_missing_transformers_is_told_with_its_cure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal_plan(f"hf:{folder}") == 2
    assert "transformers is not installed: pip install 'shoal[hf]'" in capsys.readouterr().err


def test_a_length_without_a_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_plan("digits", "--seq", "8") == 2
    assert "--seq: only for hf:DIRECTORY" in capsys.readouterr().err
