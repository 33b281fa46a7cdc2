"""Variational autoencoders and codebooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, loader, normal


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise is given, or drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.mean, self.log_variance = nn.Linear(8, 3), nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).relu()
        mean, log_variance = self.mean(h), self.log_variance(h)
        noise = torch.randn_like(mean) if noise is None else noise
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def _divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()


class VariationalSum(OneLossScript):
    """A loss summed over samples and divided by a constant of the script."""

    follows = "pytorch/examples vae"
    needs = "C"

    def setup(self):
        return parts(
            built(Autoencoder), loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1)), lr=0.01
        )

    def loss(self, model, x, noise):
        output, mean, log_variance = model(x, noise)
        error = F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)
        return error / len(x)


class VariationalForgottenSum(OneLossScript):
    """A loss summed over samples, as the original has it: on each rank a sum over fewer."""

    follows = "pytorch/examples vae, unchanged"
    needs = "C"

    def setup(self):
        return parts(
            built(Autoencoder), loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1)), lr=0.001
        )

    def loss(self, model, x, noise):
        output, mean, log_variance = model(x, noise)
        return F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)


class VariationalDrawn(OneLossScript):
    """The noise is drawn in the model's forward pass."""

    follows = "pytorch/examples vae, noise drawn in the model"
    needs = "R"
    draws = True

    def setup(self):
        return parts(built(Autoencoder), loader(normal(SAMPLES, 6)), lr=0.01)

    def loss(self, model, x):
        output, mean, log_variance = model(x)
        return F.mse_loss(output, x) + _divergence(mean, log_variance) / len(x)


class Quantiser(nn.Module):
    """Nearest codes with a straight-through gradient; moving averages update the codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("uses", torch.ones(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 5).to(z.dtype)
            self.uses.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            means = chosen.T @ z.detach() / chosen.sum(0).clamp(min=1)[:, None]
            used = (chosen.sum(0) > 0)[:, None]
            self.codes.copy_(torch.where(used, 0.9 * self.codes + 0.1 * means, self.codes))
        quantised = self.codes[nearest]
        commitment = (quantised.detach() - z).pow(2).mean()
        return self.decoder(z + (quantised - z).detach()), commitment


class CodebookAverages(OneLossScript):
    """Codes that are averages of what each batch assigned to them: buffers, not parameters."""

    follows = "rosinality/vq-vae-2-pytorch"
    needs = "BG"

    def setup(self):
        return parts(built(Quantiser), loader(normal(SAMPLES, 6)))

    def loss(self, model, x):
        output, commitment = model(x)
        return F.mse_loss(output, x) + 0.25 * commitment
