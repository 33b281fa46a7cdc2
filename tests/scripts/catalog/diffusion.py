"""Diffusion models."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, integers, loader, mlp, normal, sgd

ALPHA = torch.linspace(0.99, 0.1, 10, dtype=torch.float64)
"""The share of the signal that is left at each time."""


class Denoiser(nn.Module):
    """Predicts the noise from a noisy sample and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.inputs, self.outputs = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.outputs(torch.tanh(self.inputs(x) + self.time(t)))


class DiffusionDrawn(OneLossScript):
    """Time and noise are drawn in the loss."""

    follows = "lucidrains/denoising-diffusion-pytorch"
    needs = "R"
    draws = True

    def setup(self):
        return parts(built(Denoiser), loader(normal(SAMPLES, 6)))

    def loss(self, model, x):
        t, noise = torch.randint(10, (len(x),)), torch.randn_like(x)
        a = ALPHA[t][:, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


class DiffusionAverage(OneLossScript):
    """Noise by the data set; an average of the weights; weights of losses by signal to noise."""

    follows = "openai/guided-diffusion"
    needs = "T"

    def setup(self):
        model = built(Denoiser)
        self.average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(normal(SAMPLES, 6), integers(10, SAMPLES), normal(SAMPLES, 6, seed=1))
        return model, optimizer, data

    def loss(self, model, x, t, noise):
        a = ALPHA[t][:, None]
        error = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).pow(2)
        return (error * (a / (1 - a)).clamp(max=5)).mean()

    def after_step(self, step, model, optimizer, losses):
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(new, alpha=0.1)
        losses.append(self.average(torch.ones(1, 6), torch.tensor([3])).sum())


class LatentDiffusion(OneLossScript):
    """A frozen encoder and a frozen text model beside the one that trains; batches are dicts."""

    follows = "diffusers train_text_to_image.py"
    needs = "KMF"

    def setup(self):
        self.encoder, self.text, model = mlp(8, 6), nn.EmbeddingBag(9, 6), built(Denoiser, seed=2)
        nn.init.normal_(self.text.weight, generator=torch.Generator().manual_seed(7))
        self.encoder.requires_grad_(False)
        self.text.requires_grad_(False)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 8), integers(9, SAMPLES, 4), normal(SAMPLES, 6, seed=1))
        return model, optimizer, data

    def loss(self, model, pixels, words, noise):
        with torch.no_grad():
            latents, prompt = self.encoder(pixels), self.text(words)
        t = words.sum(1) % 10
        a = ALPHA[t][:, None]
        output = model(a.sqrt() * latents + (1 - a).sqrt() * noise + prompt, t)
        each = F.mse_loss(output, noise, reduction="none").mean(1)
        return (each * (5 / (1 + t))).mean()
