"""Training in phases, adapters, preferences and distillation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.catalog.language import Gpt
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
from tests.scripts.script import Script, draw_as_rank_0, weights


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


class FrozenBackbone(Script):
    """A frozen body under a head that trains, from beginning to end."""

    follows = "torchvision's feature extraction"
    needs = "F"

    @staticmethod
    def plain():
        model = cnn()
        model[0].requires_grad_(False)
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        data = loader(*images())
        losses = []
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
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


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


class Lora(Script):
    """Adapters beside frozen layers; the mean over answers only."""

    follows = "huggingface/peft examples"
    needs = "FKC"

    @staticmethod
    def plain():
        model = _with_adapters()
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        tokens, labels = uneven_sequences()
        data = dict_loader({"x": tokens, "y": labels})
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"])[0].flatten(0, 1), batch["y"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = _with_adapters()
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        tokens, labels = uneven_sequences()
        data = dict_loader({"x": tokens, "y": labels})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="sum")
            return shoal.counted(loss, (y != PADDED).sum())

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class LowBitLinear(nn.Module):
    """Integer weights in a buffer, made floating in each pass; only the adapter trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().max() / 7)
        self.register_buffer("codes", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.adapter = nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale) + 0.1 * self.adapter(x)


class QuantisedAdapters(Script):
    """Frozen weights in few bits, which are buffers."""

    follows = "artidoro/qlora"
    needs = "F"

    @staticmethod
    def plain():
        base = mlp(6, 8, 4)
        model = nn.Sequential(LowBitLinear(base[0]), nn.Tanh(), LowBitLinear(base[2]))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        base = mlp(6, 8, 4)
        model = nn.Sequential(LowBitLinear(base[0]), nn.Tanh(), LowBitLinear(base[2]))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Distillation(Script):
    """A large teacher in evaluation mode, a small student; both models are prepared."""

    follows = "Hinton's recipe, facebookresearch/deit"
    needs = "TM"

    @staticmethod
    def plain():
        student, teacher = mlp(6, 4), mlp(6, 16, 4, seed=1)
        teacher.eval().requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output = student(x)
            with torch.no_grad():
                wanted = (teacher(x) / 2).softmax(1)
            soft = F.kl_div((output / 2).log_softmax(1), wanted, reduction="batchmean")
            loss = 0.5 * F.cross_entropy(output, y) + 0.5 * 4 * soft
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(student, teacher)

    @staticmethod
    def with_shoal(run):
        student, teacher = mlp(6, 4), mlp(6, 16, 4, seed=1)
        teacher.eval().requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(*vectors())
        student, teacher, optimizer, data = run.prepare(student, teacher, optimizer, data)

        def compute_loss(x, y):
            output = student(x)
            with torch.no_grad():
                wanted = (teacher(x) / 2).softmax(1)
            soft = F.kl_div((output / 2).log_softmax(1), wanted, reduction="batchmean")
            return 0.5 * F.cross_entropy(output, y) + 0.5 * 4 * soft

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def _log_probability(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of each row."""
    logs = model(tokens)[0].log_softmax(-1)
    chosen = logs.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return (chosen * (labels != PADDED)).sum(1)


class Preferences(Script):
    """Chosen and rejected answers against a frozen reference."""

    follows = "TRL DPO"
    needs = "KT"

    @staticmethod
    def plain():
        model = built(Gpt)
        reference = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        tokens, labels = uneven_sequences()
        data = dict_loader({"good": tokens, "bad": tokens.flip(0), "labels": labels})
        losses = []
        for batch in data:
            optimizer.zero_grad()
            good, bad, labels = batch["good"], batch["bad"], batch["labels"]
            gain = _log_probability(model, good, labels) - _log_probability(model, bad, labels)
            with torch.no_grad():
                base = _log_probability(reference, good, labels)
                base = base - _log_probability(reference, bad, labels)
            loss = -F.logsigmoid(0.5 * (gain - base)).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        reference = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        tokens, labels = uneven_sequences()
        data = dict_loader({"good": tokens, "bad": tokens.flip(0), "labels": labels})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(good, bad, labels):
            gain = _log_probability(model, good, labels) - _log_probability(model, bad, labels)
            with torch.no_grad():
                base = _log_probability(reference, good, labels)
                base = base - _log_probability(reference, bad, labels)
            return -F.logsigmoid(0.5 * (gain - base)).mean()

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, **batch)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Scored(nn.Module):
    """A language model with a head that scores the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = Gpt(), nn.Linear(VOCABULARY, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.body(tokens)[0][:, -1]).squeeze(1)


class RewardModel(Script):
    """Rankings of pairs that are concatenated to one batch and cut apart again."""

    follows = "TRL reward trainer"
    needs = "KV"

    @staticmethod
    def plain():
        model = built(Scored)
        optimizer = sgd(model.parameters())
        tokens, _ = uneven_sequences()
        data = dict_loader({"chosen": tokens, "rejected": tokens.flip(1)})
        losses = []
        for batch in data:
            optimizer.zero_grad()
            scores = model(torch.cat([batch["chosen"], batch["rejected"]]))
            good, bad = scores.chunk(2)
            loss = -F.logsigmoid(good - bad).mean()
            loss.backward()
            optimizer.step()
            losses += [loss, (good > bad).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Scored)
        optimizer = sgd(model.parameters())
        tokens, _ = uneven_sequences()
        data = dict_loader({"chosen": tokens, "rejected": tokens.flip(1)})
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(batch):
            scores = model(torch.cat([batch["chosen"], batch["rejected"]]))
            good, bad = scores.chunk(2)
            return -F.logsigmoid(good - bad).mean(), shoal.summed((good > bad).sum())

        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss, right = run.forward_backward(compute_loss, batch)
            optimizer.step()
            losses += [loss, right]
        return losses, run.weights()


class GroupRelative(Script):
    """Advantages normalised within each prompt's group of answers; the mean over all tokens."""

    follows = "TRL GRPO"
    needs = "CK"

    @staticmethod
    def plain():
        model = built(Gpt)
        before = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        tokens = integers(VOCABULARY, SAMPLES, 3, 6)
        live = torch.arange(6) < integers(5, SAMPLES, 3, 1, seed=3) + 1
        data = loader(tokens, live, integers(5, SAMPLES, 3, seed=4).double())
        losses = []
        for answers, live, reward in data:
            optimizer.zero_grad()
            gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 0.1)
            flat, live, gain = answers.flatten(0, 1), live.flatten(0, 1), gain.flatten()
            new, old = (
                m(flat)[0].log_softmax(-1).gather(2, flat[..., None]).squeeze(2)
                for m in (model, before)
            )
            ratio = (new - old).exp()
            each = -torch.min(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
            loss = (each * live).sum() / live.sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Gpt)
        before = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        tokens = integers(VOCABULARY, SAMPLES, 3, 6)
        live = torch.arange(6) < integers(5, SAMPLES, 3, 1, seed=3) + 1
        data = loader(tokens, live, integers(5, SAMPLES, 3, seed=4).double())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(answers, live, reward):
            gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 0.1)
            flat, live, gain = answers.flatten(0, 1), live.flatten(0, 1), gain.flatten()
            new, old = (
                m(flat)[0].log_softmax(-1).gather(2, flat[..., None]).squeeze(2)
                for m in (model, before)
            )
            ratio = (new - old).exp()
            each = -torch.min(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
            return shoal.counted((each * live).sum(), live.sum())

        losses = []
        for answers, live, reward in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, answers, live, reward)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class TextualInversion(Script):
    """One row of an embedding learns; the others are put back after each step."""

    follows = "diffusers textual_inversion.py"
    needs = "FZW"

    @staticmethod
    def plain():
        embedding = nn.Embedding(VOCABULARY, 8)
        nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(embedding, nn.Flatten(), mlp(48, 4).requires_grad_(False))
        optimizer = sgd(embedding.parameters())
        original = embedding.weight.detach().clone()
        tokens, _ = uneven_sequences()
        data = loader(tokens, integers(4, SAMPLES))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                embedding.weight[:-1] = original[:-1]
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        embedding = nn.Embedding(VOCABULARY, 8)
        nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(embedding, nn.Flatten(), mlp(48, 4).requires_grad_(False))
        optimizer = sgd(embedding.parameters())
        original = embedding.weight.detach().clone()
        tokens, _ = uneven_sequences()
        data = loader(tokens, integers(4, SAMPLES))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            with torch.no_grad():
                embedding.weight[:-1] = original[:-1]
            losses.append(loss)
        return losses, run.weights()


class AgreeingDropout(Script):
    """Two passes with other masks that must agree."""

    follows = "dropreg/R-Drop"
    needs = "RX"

    @staticmethod
    def plain():
        model = nn.Sequential(mlp(6, 8), nn.Dropout(0.3), mlp(8, 4))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        draw_as_rank_0()
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            a, b = model(x).log_softmax(1), model(x).log_softmax(1)
            apart = F.kl_div(a, b, reduction="batchmean", log_target=True)
            loss = F.nll_loss(a, y) + F.nll_loss(b, y) + apart
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = nn.Sequential(mlp(6, 8), nn.Dropout(0.3), mlp(8, 4))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            a, b = model(x).log_softmax(1), model(x).log_softmax(1)
            apart = F.kl_div(a, b, reduction="batchmean", log_target=True)
            return F.nll_loss(a, y) + F.nll_loss(b, y) + apart

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
