"""A training job with `ShoalTrainer`, as ranks of a test run it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import shoal
from shoal.integrations.transformers import ShoalTrainer

VOCABULARY, LENGTH, IGNORED = 64, 12, -100


def texts() -> list[dict[str, torch.Tensor]]:
    """Return 24 padded texts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(24):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.arange(LENGTH) < 5 + index % 7
        labels = torch.where(mask, tokens, IGNORED)
        found.append({"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": labels})
    return found


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def bert_config() -> BertConfig:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes, **dropout)


def bert() -> BertForSequenceClassification:
    """Return a classifier, whose `forward` takes further keywords and whose loss is a mean."""
    return BertForSequenceClassification(bert_config())


def masked() -> BertForMaskedLM:
    """Return a model whose loss is the mean over masked tokens."""
    return BertForMaskedLM(bert_config())


def mask_tokens(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with some tokens masked, drawn as DataCollatorForLanguageModeling does."""
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    is_masked = (torch.rand(batch["input_ids"].shape) < 0.3) & batch["attention_mask"].bool()
    batch["labels"] = torch.where(is_masked, batch["input_ids"], IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(is_masked, 0)
    return batch


def classes() -> list[dict[str, torch.Tensor]]:
    """Return 24 padded texts, each with a class."""
    return [{**text, "labels": text["input_ids"].sum() % 2} for text in texts()]


JOBS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Any], Any]] = {
    "llama": (llama, texts, None),
    "bert": (bert, classes, None),
    "masked": (masked, texts, mask_tokens),
}


def train(
    strategy: str,
    folder: Path,
    settings: dict[str, Any],
    resume: str | None = None,
    job: str = "llama",
) -> dict[str, list[float]]:
    """Train two epochs; return the losses of steps and evaluations, as this rank has them.

    Args: strategy: empty for transformers' own Trainer. job: of JOBS.
    """
    run = shoal.init(strategy, announce=lambda _: None) if strategy else None
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=2,
        eval_strategy="epoch",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    make_model, make_data, collate = JOBS[job]
    data = make_data()
    kind = partial(ShoalTrainer, run=run) if strategy else Trainer
    trainer = kind(
        model=make_model(),
        args=args,
        data_collator=collate,
        train_dataset=data,
        eval_dataset=data[:10],
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {
        key: [float(entry[key]) for entry in history if key in entry]
        for key in ("loss", "grad_norm", "eval_loss")
    }
