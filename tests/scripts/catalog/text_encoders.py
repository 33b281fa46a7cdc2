"""Encoders of text: masked words, and answers marked in a text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.catalog.language import Gpt
from tests.scripts.one_loss import OneLossScript
from tests.scripts.samples import (
    PADDED,
    SAMPLES,
    VOCABULARY,
    built,
    dict_loader,
    integers,
    sequences,
    sgd,
    uneven_sequences,
)
from tests.scripts.script import Script, weights


class MaskedModel(nn.Module):
    """An encoder with a masked-language head, called by keyword; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        h = self.embedding(input_ids)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(h)}


class MaskedLanguage(OneLossScript):
    """Masked language modelling of padded sequences: few tokens of each sample count."""

    follows = "transformers run_mlm_no_trainer.py"
    needs = "KC"

    def setup(self):
        model = built(MaskedModel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        tokens, labels = uneven_sequences()
        mask = torch.ones_like(tokens).masked_fill(labels == PADDED, 0)
        mask[:, 0] = 1
        data = dict_loader({"input_ids": tokens, "attention_mask": mask, "labels": labels})
        return model, optimizer, data

    def loss(self, model, labels, **batch):
        output = model(**batch)
        return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())

    def shoal_loss(self, run, model, labels, **batch):
        labels = labels.flatten()
        output = model(**batch)
        loss = F.cross_entropy(output["logits"].flatten(0, 1), labels, reduction="sum")
        return shoal.counted(loss, (labels != PADDED).sum())


class QuestionAnswering(nn.Module):
    """Two heads over one encoder: where an answer begins and where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gpt()
        self.span = nn.Linear(VOCABULARY, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        begin, end = self.span(self.body(tokens)[0]).unbind(-1)
        return begin, end


class ExtractiveAnswers(Script):
    """The mean of two cross-entropies; exact matches of the outputs are counted."""

    follows = "transformers run_qa_no_trainer.py"
    needs = "KE"

    @staticmethod
    def plain():
        model = built(QuestionAnswering)
        optimizer = sgd(model.parameters())
        tokens, _ = sequences()
        begins, ends = integers(6, SAMPLES, seed=6), integers(6, SAMPLES, seed=7)
        data = dict_loader({"tokens": tokens, "begin": begins, "end": ends})
        losses = []
        for batch in data:
            optimizer.zero_grad()
            begin, end = model(batch["tokens"])
            loss = (F.cross_entropy(begin, batch["begin"]) + F.cross_entropy(end, batch["end"])) / 2
            loss.backward()
            optimizer.step()
            losses += [loss, (begin.argmax(1) == batch["begin"]).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(QuestionAnswering)
        optimizer = sgd(model.parameters())
        tokens, _ = sequences()
        begins, ends = integers(6, SAMPLES, seed=6), integers(6, SAMPLES, seed=7)
        data = dict_loader({"tokens": tokens, "begin": begins, "end": ends})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(batch):
            begin, end = model(batch["tokens"])
            loss = (F.cross_entropy(begin, batch["begin"]) + F.cross_entropy(end, batch["end"])) / 2
            return loss, {"hits": shoal.summed((begin.argmax(1) == batch["begin"]).sum())}

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss, measured = run.forward_backward(compute_loss, batch)
            optimizer.step()
            losses += [loss, measured["hits"]]
        return losses, run.weights()
