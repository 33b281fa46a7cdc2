"""Causal models of transformers itself, from small configurations: dict batches, padding, `.loss`.

They compute their loss in float32, whatever the type of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
import shoal.platform.torchvision_import

import transformers as hf  # isort: skip
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import PADDED, SAMPLES, dict_loader, integers

FLOAT32 = 1e-5
VOCABULARY = 20
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**WIDTHS, num_key_value_heads=1)).train()


def qwen2() -> nn.Module:
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**WIDTHS, num_key_value_heads=2)).train()


def padded(length: int = 7) -> DataLoader:
    """Return a loader of token sequences of other lengths, padded, with labels of -100 there."""
    tokens = integers(VOCABULARY - 1, SAMPLES, length) + 1
    ends = integers(length - 2, SAMPLES, 1, seed=2) + 3
    mask = (torch.arange(length) < ends).long()
    labels = tokens.masked_fill(mask == 0, PADDED)
    return dict_loader({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})


def full() -> DataLoader:
    """Return a loader of sequences of one length."""
    tokens = integers(VOCABULARY, SAMPLES, 7)
    return dict_loader({"input_ids": tokens, "labels": tokens})


def targets_in(labels: Tensor) -> Tensor:
    """Return how many tokens a causal model predicts: all but the first of each sequence."""
    return (labels[:, 1:] != PADDED).sum()


class HfGpt2(OneLossScript):
    """GPT-2 on sequences of one length, by its own mean over tokens."""

    follows = "transformers GPT2LMHeadModel, `.loss`"
    needs = "K"
    tolerance = FLOAT32

    def setup(self):
        return parts(gpt2(), full())

    def loss(self, model, **batch):
        return model(**batch).loss


class HfGpt2OwnLoss(OneLossScript):
    """GPT-2 on padded sequences by its logits; the loss is the script's own, in float64."""

    follows = "transformers GPT2LMHeadModel, logits"
    needs = "KC"

    def setup(self):
        return parts(gpt2(), padded())

    def loss(self, model, labels, **batch):
        labels = labels[:, 1:].flatten()
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels)

    def shoal_loss(self, run, model, labels, **batch):
        labels = labels[:, 1:].flatten()
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return shoal.counted(loss, (labels != PADDED).sum())


class HfGpt2Padded(OneLossScript):
    """GPT-2 on padded sequences: the model's own sum, divided by the tokens of all ranks."""

    follows = "transformers GPT2LMHeadModel, `.loss` with num_items_in_batch"
    needs = "KC"
    tolerance = FLOAT32
    make = staticmethod(gpt2)

    def setup(self):
        return parts(self.make(), padded())

    def loss(self, model, **batch):
        return model(**batch).loss

    def shoal_loss(self, run, model, **batch):
        loss = model(**batch, num_items_in_batch=1).loss
        return shoal.counted(loss, targets_in(batch["labels"]))


class HfLlama(HfGpt2Padded):
    """Llama with one key-value head for two query heads, on padded sequences."""

    follows = "transformers LlamaForCausalLM, `.loss` with num_items_in_batch"
    make = staticmethod(llama)


class HfQwen2(HfGpt2Padded):
    """Qwen 2 on padded sequences."""

    follows = "transformers Qwen2ForCausalLM, `.loss` with num_items_in_batch"
    make = staticmethod(qwen2)


class HfGpt2Forgotten(HfGpt2Padded):
    """GPT-2 on padded sequences by its own mean: ranks have other numbers of tokens."""

    follows = "transformers GPT2LMHeadModel, `.loss`, padded"
    needs = "KC"
    tolerance = FLOAT32

    shoal_loss = OneLossScript.shoal_loss
