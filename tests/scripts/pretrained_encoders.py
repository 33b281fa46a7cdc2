"""Encoders and encoder-decoders of transformers: BERT, T5 and ViT, from small configurations.

T5 computes its softmax in float32, whatever the type of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
import shoal.platform.torchvision_import

import transformers as hf  # isort: skip
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.pretrained import FLOAT32, NO_DROPOUT, VOCABULARY, WIDTHS, padded
from tests.scripts.samples import PADDED, SAMPLES, dict_loader, integers, normal
from tests.scripts.script import Script, weights


def bert(head: Any) -> nn.Module:
    torch.manual_seed(0)
    return head(hf.BertConfig(**WIDTHS, **NO_DROPOUT, num_labels=3)).train()


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).train()


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {key: value for key, value in WIDTHS.items() if "vocab" not in key and "pos" not in key}
    config = hf.ViTConfig(
        **sizes, **NO_DROPOUT, image_size=8, patch_size=4, num_channels=1, num_labels=3
    )
    return hf.ViTForImageClassification(config).train()


class HfBertClassifier(Script):
    """BERT classifies padded sequences; the accuracy is counted."""

    follows = "transformers run_glue_no_trainer.py"
    needs = "KE"

    @staticmethod
    def plain():
        model = bert(hf.BertForSequenceClassification)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = _labelled()
        losses = []
        for batch in data:
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [outputs.loss, (outputs.logits.argmax(1) == batch["labels"]).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = bert(hf.BertForSequenceClassification)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = _labelled()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(batch):
            outputs = model(**batch)
            hits = (outputs.logits.argmax(1) == batch["labels"]).sum()
            return outputs.loss, shoal.summed(hits)

        losses = []
        for batch in data:
            loss, hits = run.forward_backward(compute_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss, hits]
        return losses, run.weights()


def _labelled() -> DataLoader:
    tokens = integers(VOCABULARY, SAMPLES, 7)
    mask = (torch.arange(7) < integers(5, SAMPLES, 1, seed=2) + 3).long()
    labels = integers(3, SAMPLES, seed=4)
    return dict_loader({"input_ids": tokens, "attention_mask": mask, "labels": labels})


class HfBertMasked(OneLossScript):
    """BERT predicts masked tokens: its own mean, as a sum of so many tokens."""

    follows = "transformers run_mlm_no_trainer.py"
    needs = "KC"

    def setup(self):
        return parts(bert(hf.BertForMaskedLM), padded())

    def loss(self, model, **batch):
        return model(**batch).loss

    def shoal_loss(self, run, model, **batch):
        count = (batch["labels"] != PADDED).sum()
        return shoal.counted(model(**batch).loss * count, count)


class HfT5(HfBertMasked):
    """T5 from padded sources to padded targets."""

    follows = "transformers run_translation_no_trainer.py"
    needs = "KC"
    tolerance = FLOAT32

    def setup(self):
        return parts(t5(), padded(), lr=0.02)


class HfVit(OneLossScript):
    """ViT classifies images given by keyword."""

    follows = "transformers run_image_classification_no_trainer.py"
    needs = "K"

    def setup(self):
        images, labels = normal(SAMPLES, 1, 8, 8), integers(3, SAMPLES, seed=4)
        return parts(vit(), dict_loader({"pixel_values": images, "labels": labels}))

    def loss(self, model, **batch):
        return model(**batch).loss
