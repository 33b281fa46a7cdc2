"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, integers, loader


class Experts(nn.Module):
    """Two experts of four for each token; returns the logits and what balances the load."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, and for each token the probabilities and the choices of experts."""
        h = self.embedding(tokens)
        chances = self.router(h).softmax(-1)
        weight, chosen = chances.topk(2, dim=-1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).any(-1)
            if where.any():
                share = (weight * (chosen == number)).sum(-1)[where]
                mixed[where] = mixed[where] + share[:, None] * expert(h[where])
        choices = F.one_hot(chosen, 4).sum(-2).to(h.dtype)
        return self.head(h + mixed), chances, choices


class ExpertsPlain(OneLossScript):
    """Tokens choose their experts; some experts get none on some ranks."""

    follows = "transformers Mixtral, without balance loss"
    needs = "U"

    def setup(self):
        return parts(
            built(Experts), loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        )

    def loss(self, model, x, y):
        logits, _, _ = model(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class ExpertsBalanced(OneLossScript):
    """The load of the experts is balanced over the global batch: a product of two means."""

    follows = "Switch Transformer, transformers Mixtral"
    needs = "GUC"

    def setup(self):
        return parts(
            built(Experts), loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        )

    def loss(self, model, x, y):
        logits, chances, choices = model(x)
        load = choices.mean((0, 1))
        balance = 4 * (load * chances.mean((0, 1))).sum()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * balance

    def shoal_loss(self, run, model, x, y):
        logits, chances, choices = model(x)
        load = run.gather(choices).mean((0, 1))
        balance = 4 * (load * chances.mean((0, 1))).sum()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * balance


class ExpertsForgotten(ExpertsBalanced):
    """The same without gathering: each rank would balance its own tokens."""

    follows = "transformers Mixtral, unchanged"
    needs = "GUC"
    shoal_loss = OneLossScript.shoal_loss
