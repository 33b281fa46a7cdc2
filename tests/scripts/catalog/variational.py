"""Variational autoencoders and codebooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import SAMPLES, built, loader, normal, sgd
from tests.scripts.script import Script, draw_as_rank_0, weights


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


class VariationalSum(Script):
    """A loss summed over samples and divided by a constant of the script."""

    follows = "pytorch/examples vae"
    needs = "C"

    @staticmethod
    def plain():
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.01)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        losses = []
        for x, noise in data:
            optimizer.zero_grad()
            output, mean, log_variance = model(x, noise)
            error = F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)
            loss = error / len(x)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.01)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, noise):
            output, mean, log_variance = model(x, noise)
            error = F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)
            return error / len(x)

        losses = []
        for x, noise in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, noise)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class VariationalForgottenSum(Script):
    """A loss summed over samples, as the original has it: on each rank a sum over fewer."""

    follows = "pytorch/examples vae, unchanged"
    needs = "C"

    @staticmethod
    def plain():
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.001)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        losses = []
        for x, noise in data:
            optimizer.zero_grad()
            output, mean, log_variance = model(x, noise)
            loss = F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.001)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, noise):
            output, mean, log_variance = model(x, noise)
            return F.mse_loss(output, x, reduction="sum") + _divergence(mean, log_variance)

        losses = []
        for x, noise in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, noise)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class VariationalDrawn(Script):
    """The noise is drawn in the model's forward pass."""

    follows = "pytorch/examples vae, noise drawn in the model"
    needs = "R"

    @staticmethod
    def plain():
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.01)
        data = loader(normal(SAMPLES, 6))
        draw_as_rank_0()
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            output, mean, log_variance = model(x)
            loss = F.mse_loss(output, x) + _divergence(mean, log_variance) / len(x)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Autoencoder)
        optimizer = sgd(model.parameters(), 0.01)
        data = loader(normal(SAMPLES, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            output, mean, log_variance = model(x)
            return F.mse_loss(output, x) + _divergence(mean, log_variance) / len(x)

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


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


class CodebookAverages(Script):
    """Codes that are averages of what each batch assigned to them: buffers, not parameters."""

    follows = "rosinality/vq-vae-2-pytorch"
    needs = "BG"

    @staticmethod
    def plain():
        model = built(Quantiser)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6))
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            output, commitment = model(x)
            loss = F.mse_loss(output, x) + 0.25 * commitment
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Quantiser)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            output, commitment = model(x)
            return F.mse_loss(output, x) + 0.25 * commitment

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
