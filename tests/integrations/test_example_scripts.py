"""Example scripts of transformers, three lines longer: the figures of the script on one process.

    export SHOAL_TRANSFORMERS_EXAMPLES=~/transformers/examples/pytorch
    pytest -m slow tests/integrations/test_example_scripts.py

The scripts of a checkout as old as the installed transformers. They train tiny models on texts made
here, and need no network.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="pip install shoal[hf]")
pytest.importorskip("datasets", reason="pip install shoal[hf]")
pytest.importorskip("evaluate", reason="pip install evaluate scikit-learn")

VARIABLE = "SHOAL_TRANSFORMERS_EXAMPLES"
EXAMPLES = os.environ.get(VARIABLE, "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not EXAMPLES, reason=f"{VARIABLE}=DIRECTORY names examples/pytorch of transformers"
    ),
]
TOLERANCE = 2e-6
ADDED = """\
import functools, shoal
from shoal.integrations.transformers import ShoalTrainer
Trainer = functools.partial(ShoalTrainer, run=shoal.init())

"""
BEFORE = "logger = logging.getLogger(__name__)"
ACCURACY = """\
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        words = dict.fromkeys(("description", "citation", "inputs_description"), "")
        return evaluate.MetricInfo(features=features, **words)

    def _compute(self, predictions, references):
        hits = sum(p == r for p, r in zip(predictions, references))
        return {"accuracy": hits / len(references)}
"""
TEXTS = ["--train_file", "train.txt", "--validation_file", "valid.txt"]
SCRIPTS = {
    "language-modeling/run_clm.py": ["--model_name_or_path", "gpt2", *TEXTS, "--block_size", "32"],
    "language-modeling/run_mlm.py": [
        *("--model_name_or_path", "bert", *TEXTS),
        *("--max_seq_length", "32", "--line_by_line", "--dataloader_num_workers", "2"),
    ],
    "text-classification/run_glue.py": [
        *("--model_name_or_path", "bert", "--train_file", "train.csv"),
        *("--validation_file", "valid.csv", "--max_seq_length", "64"),
    ],
}
COMMON = [
    *("--do_train", "--do_eval", "--max_steps", "4", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"),
    *("--learning_rate", "1e-2", "--report_to", "none", "--save_strategy", "no"),
]
FIGURES = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "train_loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts, two models, their tokenizer and a metric."""
    place = tmp_path_factory.mktemp("examples")
    draw = random.Random(0)
    words = [f"w{index}" for index in range(60)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(200)]
    for name, part in (("train", texts[:160]), ("valid", texts[160:])):
        (place / f"{name}.txt").write_text("\n".join(part))
        with (place / f"{name}.csv").open("w", newline="") as file:
            rows = [(text, int(text.count("w1") > 3)) for text in part]
            csv.writer(file).writerows([("sentence", "label"), *rows])
    _save_models(place, texts)
    (place / "accuracy").mkdir()
    (place / "accuracy/accuracy.py").write_text(ACCURACY)
    return place


def _save_models(place: Path, texts: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=special)
    words.train_from_iterator(texts, trainer)
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=64,
        **{f"{key}_token": token for key, token in names.items()},
    )
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertConfig(**sizes, **rates, hidden_size=32, intermediate_size=64)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = transformers.GPT2Config(**sizes, **rates, hidden_size=32, bos_token_id=2, eos_token_id=3)
    transformers.BertForMaskedLM(bert).save_pretrained(place / "bert")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(place / "gpt2")
    for model in ("bert", "gpt2"):
        tokenizer.save_pretrained(place / model)


def figures(folder: Path, command: list[str], script: Path, words: list[str]) -> dict[str, Any]:
    """Return the figures that a script has logged, by step and name."""
    out = folder / f"out-{len([*folder.glob('out-*')])}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), *words, *COMMON, "--output_dir", str(out)],
        cwd=folder,
        env={**os.environ, **offline, "HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    history = json.loads(next(out.rglob("trainer_state.json")).read_text())["log_history"]
    results = json.loads(next(out.rglob("all_results.json")).read_text())
    return dict(_figures_in([*history, {**results, "step": "last"}]))


def _figures_in(history: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for entry in history:
        for name in FIGURES:
            if name in entry:
                yield f"step {entry['step']}: {name}", float(entry[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_with_three_lines_more_has_the_figures_of_one_process(
    name: str, folder: Path
) -> None:
    original, words = Path(EXAMPLES) / name, SCRIPTS[name]
    changed = folder / original.name
    changed.write_text(original.read_text().replace(BEFORE, ADDED + BEFORE, 1))
    expected = figures(folder, [sys.executable], original, words)
    assert {"step 4: loss", "step last: eval_loss", "step last: train_loss"} <= {*expected}
    launch = [sys.executable, "-m", "shoal", "launch", "-n", "2", "--strategy"]
    for strategy in ("ddp", "zero3", "tensor=2", "pipeline=2"):
        found = figures(folder, [*launch, strategy], changed, words)
        assert found == pytest.approx(expected, rel=TOLERANCE), strategy
