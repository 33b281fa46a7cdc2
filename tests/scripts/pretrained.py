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
from tests.scripts.samples import PADDED, SAMPLES, dict_loader, integers, sgd
from tests.scripts.script import Script, weights

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


class HfGpt2(Script):
    """GPT-2 on sequences of one length, by its own mean over tokens."""

    follows = "transformers GPT2LMHeadModel, `.loss`"
    needs = "K"
    tolerance = FLOAT32

    @staticmethod
    def plain():
        model = gpt2()
        optimizer = sgd(model.parameters())
        data = full()
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = gpt2()
        optimizer = sgd(model.parameters())
        data = full()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(**batch):
            return model(**batch).loss

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class HfGpt2OwnLoss(Script):
    """GPT-2 on padded sequences by its logits; the loss is the script's own, in float64."""

    follows = "transformers GPT2LMHeadModel, logits"
    needs = "KC"

    @staticmethod
    def plain():
        model = gpt2()
        optimizer = sgd(model.parameters())
        data = padded()
        losses = []
        for batch in data:
            optimizer.zero_grad()
            labels = batch.pop("labels")[:, 1:].flatten()
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = gpt2()
        optimizer = sgd(model.parameters())
        data = padded()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(labels, **batch):
            labels = labels[:, 1:].flatten()
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            return shoal.counted(loss, (labels != PADDED).sum())

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def _causal(name: str, make: Any, title: str, doc: str) -> type[Script]:
    """Return the script of a causal model on padded sequences."""

    def plain():
        model = make()
        optimizer = sgd(model.parameters())
        data = padded()
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    def with_shoal(run):
        model = make()
        optimizer = sgd(model.parameters())
        data = padded()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(**batch):
            loss = model(**batch, num_items_in_batch=1).loss
            return shoal.counted(loss, targets_in(batch["labels"]))

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()

    members = {
        "__doc__": doc,
        "__module__": __name__,
        "follows": title,
        "needs": "KC",
        "tolerance": FLOAT32,
        "plain": staticmethod(plain),
        "with_shoal": staticmethod(with_shoal),
    }
    return type(name, (Script,), members)


HfGpt2Padded = _causal(
    "HfGpt2Padded",
    gpt2,
    "transformers GPT2LMHeadModel, `.loss` with num_items_in_batch",
    "GPT-2 on padded sequences: the model's own sum, divided by the tokens of all ranks.",
)
HfLlama = _causal(
    "HfLlama",
    llama,
    "transformers LlamaForCausalLM, `.loss` with num_items_in_batch",
    "Llama with one key-value head for two query heads, on padded sequences.",
)
HfQwen2 = _causal(
    "HfQwen2",
    qwen2,
    "transformers Qwen2ForCausalLM, `.loss` with num_items_in_batch",
    "Qwen 2 on padded sequences.",
)


class HfGpt2Forgotten(Script):
    """GPT-2 on padded sequences by its own mean: ranks have other numbers of tokens."""

    follows = "transformers GPT2LMHeadModel, `.loss`, padded"
    needs = "KC"
    tolerance = FLOAT32

    plain = HfGpt2Padded.plain

    @staticmethod
    def with_shoal(run):
        model = gpt2()
        optimizer = sgd(model.parameters())
        data = padded()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(**batch):
            return model(**batch).loss

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
