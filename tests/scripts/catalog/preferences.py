"""Language models tuned by preferences and rewards."""

from __future__ import annotations

import copy

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
    dict_loader,
    integers,
    loader,
    sgd,
    uneven_sequences,
)
from tests.scripts.script import Script, weights


def _log_probability(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of each row."""
    logs = model(tokens)[0].log_softmax(-1)
    chosen = logs.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return (chosen * (labels != PADDED)).sum(1)


class Preferences(OneLossScript):
    """Chosen and rejected answers against a frozen reference."""

    follows = "TRL DPO"
    needs = "KT"

    def setup(self):
        model = built(Gpt)
        self.reference = copy.deepcopy(model).requires_grad_(False)
        tokens, labels = uneven_sequences()
        return parts(model, dict_loader({"good": tokens, "bad": tokens.flip(0), "labels": labels}))

    def loss(self, model, good, bad, labels):
        gain = _log_probability(model, good, labels) - _log_probability(model, bad, labels)
        with torch.no_grad():
            base = _log_probability(self.reference, good, labels)
            base = base - _log_probability(self.reference, bad, labels)
        return -F.logsigmoid(0.5 * (gain - base)).mean()


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


class GroupRelative(OneLossScript):
    """Advantages normalised within each prompt's group of answers; the mean over all tokens."""

    follows = "TRL GRPO"
    needs = "CK"

    def setup(self):
        model = built(Gpt)
        self.before = copy.deepcopy(model).requires_grad_(False)
        tokens = integers(VOCABULARY, SAMPLES, 3, 6)
        live = torch.arange(6) < integers(5, SAMPLES, 3, 1, seed=3) + 1
        return parts(model, loader(tokens, live, integers(5, SAMPLES, 3, seed=4).double()))

    def tokens(self, model, answers, live, reward):
        gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 0.1)
        flat, live, gain = answers.flatten(0, 1), live.flatten(0, 1), gain.flatten()
        new, old = (
            m(flat)[0].log_softmax(-1).gather(2, flat[..., None]).squeeze(2)
            for m in (model, self.before)
        )
        ratio = (new - old).exp()
        each = -torch.min(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
        return (each * live).sum(), live.sum()

    def loss(self, model, *batch):
        total, count = self.tokens(model, *batch)
        return total / count

    def shoal_loss(self, run, model, *batch):
        return shoal.counted(*self.tokens(model, *batch))
