"""Language models and translation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.one_loss import OneLossScript
from tests.scripts.samples import (
    BATCH,
    PADDED,
    VOCABULARY,
    built,
    dict_loader,
    generator,
    integers,
    loader,
    sequences,
    sgd,
    uneven_sequences,
)
from tests.scripts.script import Script, weights


class Block(nn.Module):
    """A causal block of a transformer, normalised before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small GPT with a tied head; returns (logits, loss), as nanoGPT does."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if y is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDED)


class NanoGpt(Script):
    """Pretraining on random windows of a long text, without a loader; accumulation, clipping."""

    follows = "karpathy/nanoGPT train.py"
    needs = "NAW"

    @staticmethod
    def plain():
        model = built(Gpt)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        text, draws = integers(VOCABULARY, 200), generator(5)

        def get_batch():
            starts = torch.randint(193, (BATCH,), generator=draws)
            return tuple(torch.stack([text[i + k : i + k + 6] for i in starts]) for k in (0, 1))

        losses = []
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(math.pi * step / 3))
            for _ in range(2):
                x, y = get_batch()
                _, loss = model(x, y)
                (loss / 2).backward()
                losses.append(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        text, draws = integers(VOCABULARY, 200), generator(5)
        model, optimizer = run.prepare(model, optimizer)

        def get_batch():
            starts = torch.randint(193, (BATCH,), generator=draws)
            return tuple(torch.stack([text[i + k : i + k + 6] for i in starts]) for k in (0, 1))

        def compute_loss(x, y):
            _, loss = model(x, y)
            return loss / 2

        losses = []
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(math.pi * step / 3))
            for _ in range(2):
                x, y = run.share(get_batch())
                loss = run.forward_backward(compute_loss, x, y)
                losses.append(2 * loss)
            run.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses, run.weights()


class SpeedrunGpt(Script):
    """Two optimizers over one model: momentum for matrices, AdamW for the rest."""

    follows = "KellerJordan/modded-nanogpt"
    needs = "O"

    @staticmethod
    def plain():
        model = built(Gpt)
        matrices = [p for b in model.blocks for p in b.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        optimizers = [
            torch.optim.SGD(matrices, lr=0.05, momentum=0.95, nesterov=True),
            torch.optim.AdamW(others, lr=0.01, eps=1e-3, betas=(0.8, 0.95)),
        ]
        data = loader(*sequences())
        losses = []
        for x, y in data:
            loss = model(x, y)[1]
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        matrices = [p for b in model.blocks for p in b.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        optimizers = [
            torch.optim.SGD(matrices, lr=0.05, momentum=0.95, nesterov=True),
            torch.optim.AdamW(others, lr=0.01, eps=1e-3, betas=(0.8, 0.95)),
        ]
        data = loader(*sequences())
        model, *optimizers, data = run.prepare(model, *optimizers, data)

        def compute_loss(x, y):
            return model(x, y)[1]

        losses = []
        for x, y in data:
            loss = run.forward_backward(compute_loss, x, y)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss)
        return losses, run.weights()


class ChatTuning(Script):
    """Fine-tuning on answers only: the mean over unmasked tokens; batches are dicts."""

    follows = "TRL SFT"
    needs = "KCV"

    @staticmethod
    def plain():
        model = built(Gpt)
        optimizer = sgd(model.parameters())
        tokens, labels = uneven_sequences()
        data = dict_loader({"input_ids": tokens, "labels": labels})
        losses = []
        for batch in data:
            optimizer.zero_grad()
            logits, _ = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        optimizer = sgd(model.parameters())
        tokens, labels = uneven_sequences()
        data = dict_loader({"input_ids": tokens, "labels": labels})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(batch):
            logits, _ = model(batch["input_ids"])
            labels = batch["labels"].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            return shoal.counted(loss, (labels != PADDED).sum())

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ForgottenTokenCount(Script):
    """The same, with the mean over tokens left to the model: ranks have other numbers of them."""

    follows = "TRL SFT, unchanged"
    needs = "KC"

    plain = ChatTuning.plain

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        optimizer = sgd(model.parameters())
        tokens, labels = uneven_sequences()
        data = dict_loader({"input_ids": tokens, "labels": labels})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(input_ids, labels):
            return model(input_ids, labels)[1]

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Translator(nn.Module):
    """An encoder and a decoder with padding masks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 8), nn.Embedding(VOCABULARY, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=dropout, batch_first=True)
        self.generator = nn.Linear(8, VOCABULARY)

    def encode(self, source: Tensor, padding: Tensor) -> Tensor:
        return self.transformer.encoder(self.source(source), src_key_padding_mask=padding)

    def decode(self, memory: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer.decoder(
            self.target(target), memory, tgt_mask=causal, memory_key_padding_mask=padding
        )


class Translation(OneLossScript):
    """Encode, decode and generate are called one by one; label smoothing, Noam's schedule."""

    follows = "The Annotated Transformer"
    needs = "CVX"

    def setup(self):
        model = built(Translator)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-3)
        self.noam = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min((s + 1) ** -0.5, s / 4)
        )
        tokens, targets = uneven_sequences()
        data = loader(tokens, targets == PADDED, tokens.flip(0), targets)
        return model, optimizer, data

    def loss(self, model, source, padding, inputs, labels):
        memory = model.encode(source, padding)
        logits = model.generator(model.decode(memory, padding, inputs)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)

    def shoal_loss(self, run, model, source, padding, inputs, labels):
        memory = model.encode(source, padding)
        logits = model.generator(model.decode(memory, padding, inputs)).flatten(0, 1)
        labels = labels.flatten()
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
        return shoal.counted(loss, (labels != PADDED).sum())

    def after_step(self, step, model, optimizer, losses):
        self.noam.step()
