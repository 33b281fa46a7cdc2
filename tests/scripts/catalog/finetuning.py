"""Training in phases, and adapters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.catalog.language import Gpt
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import (
    PADDED,
    SAMPLES,
    VOCABULARY,
    built,
    cnn,
    dict_loader,
    images,
    integers,
    loader,
    mlp,
    sgd,
    uneven_sequences,
    vectors,
)
from tests.scripts.script import Script, weights


class TwoPhases(Script):
    """First the head alone, then all layers under a new optimizer."""

    follows = "the transfer learning tutorial of PyTorch"
    needs = "F"

    @staticmethod
    def plain():
        model = cnn()
        model[0].requires_grad_(False)
        optimizer = sgd(model[4].parameters())
        data = loader(*images())
        losses = []
        for phase in range(2):
            if phase == 1:
                model[0].requires_grad_(True)
                optimizer = sgd(model.parameters(), 0.01)
            for x, y in data:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = cnn()
        model[0].requires_grad_(False)
        optimizer = sgd(model[4].parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for phase in range(2):
            if phase == 1:
                model[0].requires_grad_(True)
                optimizer = run.prepare(sgd(model.parameters(), 0.01))
            for x, y in data:
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, x, y)
                optimizer.step()
                losses.append(loss)
        return losses, run.weights()


class ForgottenOptimizer(Script):
    """The second phase's optimizer is not prepared."""

    follows = "the transfer learning tutorial of PyTorch, second phase unchanged"
    needs = "F"

    plain = TwoPhases.plain

    @staticmethod
    def with_shoal(run):
        model = cnn()
        model[0].requires_grad_(False)
        optimizer = sgd(model[4].parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for phase in range(2):
            if phase == 1:
                model[0].requires_grad_(True)
                optimizer = sgd(model.parameters(), 0.01)
            for x, y in data:
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, x, y)
                optimizer.step()
                losses.append(loss)
        return losses, run.weights()


class FrozenBackbone(OneLossScript):
    """A frozen body under a head that trains, from beginning to end."""

    follows = "torchvision's feature extraction"
    needs = "F"

    def setup(self):
        model = cnn()
        model[0].requires_grad_(False)
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        data = loader(*images())
        return model, optimizer, data


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _with_adapters() -> Gpt:
    model = built(Gpt).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LoraLinear(block.qkv), LoraLinear(block.out)
    return model


class Lora(OneLossScript):
    """Adapters beside frozen layers; the mean over answers only."""

    follows = "Hu et al. 2021, by hand, without peft"
    needs = "FKC"

    def setup(self):
        model = _with_adapters()
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        tokens, labels = uneven_sequences()
        return model, optimizer, dict_loader({"x": tokens, "y": labels})

    def loss(self, model, x, y):
        return F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())

    def shoal_loss(self, run, model, x, y):
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="sum")
        return shoal.counted(loss, (y != PADDED).sum())


class LowBitLinear(nn.Module):
    """Integer weights in a buffer, made floating in each pass; only the adapter trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().max() / 7)
        self.register_buffer("codes", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.adapter = nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale) + 0.1 * self.adapter(x)


class QuantisedAdapters(OneLossScript):
    """Frozen weights in few bits, which are buffers."""

    follows = "artidoro/qlora"
    needs = "F"

    def setup(self):
        base = mlp(6, 8, 4)
        return parts(
            nn.Sequential(LowBitLinear(base[0]), nn.Tanh(), LowBitLinear(base[2])),
            loader(*vectors()),
        )


class TextualInversion(OneLossScript):
    """One row of an embedding learns; the others are put back after each step."""

    follows = "diffusers textual_inversion.py"
    needs = "FZW"

    def setup(self):
        self.embedding = nn.Embedding(VOCABULARY, 8)
        nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(self.embedding, nn.Flatten(), mlp(48, 4).requires_grad_(False))
        optimizer = sgd(self.embedding.parameters())
        self.original = self.embedding.weight.detach().clone()
        tokens, _ = uneven_sequences()
        data = loader(tokens, integers(4, SAMPLES))
        return model, optimizer, data

    def after_step(self, step, model, optimizer, losses):
        with torch.no_grad():
            self.embedding.weight[:-1] = self.original[:-1]
