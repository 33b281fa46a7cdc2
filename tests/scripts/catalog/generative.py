"""Autoencoders, diffusion and flows."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import SAMPLES, built, integers, loader, mlp, normal, sgd
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


class Denoiser(nn.Module):
    """Predicts the noise from a noisy sample and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.inputs, self.outputs = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.outputs(torch.tanh(self.inputs(x) + self.time(t)))


ALPHA = torch.linspace(0.99, 0.1, 10, dtype=torch.float64)
"""The share of the signal that is left at each time."""


class DiffusionDrawn(Script):
    """Time and noise are drawn in the loss."""

    follows = "lucidrains/denoising-diffusion-pytorch"
    needs = "R"

    @staticmethod
    def plain():
        model = built(Denoiser)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6))
        draw_as_rank_0()
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            t, noise = torch.randint(10, (len(x),)), torch.randn_like(x)
            a = ALPHA[t][:, None]
            loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Denoiser)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            t, noise = torch.randint(10, (len(x),)), torch.randn_like(x)
            a = ALPHA[t][:, None]
            return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class DiffusionAverage(Script):
    """Noise by the data set; an average of the weights; weights of losses by signal to noise."""

    follows = "openai/guided-diffusion"
    needs = "T"

    @staticmethod
    def plain():
        model = built(Denoiser)
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(normal(SAMPLES, 6), integers(10, SAMPLES), normal(SAMPLES, 6, seed=1))
        losses = []
        for x, t, noise in data:
            optimizer.zero_grad()
            a = ALPHA[t][:, None]
            error = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).pow(2)
            loss = (error * (a / (1 - a)).clamp(max=5)).mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(new, alpha=0.1)
            losses += [loss, average(torch.ones(1, 6), torch.tensor([3])).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Denoiser)
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(normal(SAMPLES, 6), integers(10, SAMPLES), normal(SAMPLES, 6, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, t, noise):
            a = ALPHA[t][:, None]
            error = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).pow(2)
            return (error * (a / (1 - a)).clamp(max=5)).mean()

        losses = []
        for x, t, noise in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, t, noise)
            optimizer.step()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(new, alpha=0.1)
            losses += [loss, average(torch.ones(1, 6), torch.tensor([3])).sum()]
        return losses, run.weights()


class LatentDiffusion(Script):
    """A frozen encoder and a frozen text model beside the one that trains; batches are dicts."""

    follows = "diffusers train_text_to_image.py"
    needs = "KMF"

    @staticmethod
    def plain():
        encoder, text, model = mlp(8, 6), nn.EmbeddingBag(9, 6), built(Denoiser, seed=2)
        nn.init.normal_(text.weight, generator=torch.Generator().manual_seed(7))
        encoder.requires_grad_(False)
        text.requires_grad_(False)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 8), integers(9, SAMPLES, 4), normal(SAMPLES, 6, seed=1))
        losses = []
        for pixels, words, noise in data:
            optimizer.zero_grad()
            with torch.no_grad():
                latents, prompt = encoder(pixels), text(words)
            t = words.sum(1) % 10
            a = ALPHA[t][:, None]
            output = model(a.sqrt() * latents + (1 - a).sqrt() * noise + prompt, t)
            each = F.mse_loss(output, noise, reduction="none").mean(1)
            loss = (each * (5 / (1 + t))).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        encoder, text, model = mlp(8, 6), nn.EmbeddingBag(9, 6), built(Denoiser, seed=2)
        nn.init.normal_(text.weight, generator=torch.Generator().manual_seed(7))
        encoder.requires_grad_(False)
        text.requires_grad_(False)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 8), integers(9, SAMPLES, 4), normal(SAMPLES, 6, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(pixels, words, noise):
            with torch.no_grad():
                latents, prompt = encoder(pixels), text(words)
            t = words.sum(1) % 10
            a = ALPHA[t][:, None]
            output = model(a.sqrt() * latents + (1 - a).sqrt() * noise + prompt, t)
            each = F.mse_loss(output, noise, reduction="none").mean(1)
            return (each * (5 / (1 + t))).mean()

        losses = []
        for pixels, words, noise in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, pixels, words, noise)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Coupling(nn.Module):
    """An invertible layer: returns the image of x, and the log-determinant for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], 1), scale.sum(1)


class NormalisingFlow(Script):
    """The likelihood of a flow: every layer returns two tensors."""

    follows = "karpathy/pytorch-normalizing-flows"
    needs = ""

    @staticmethod
    def plain():
        model = nn.ModuleList(built(Coupling, seed=i) for i in range(3))
        optimizer = sgd(model.parameters(), 0.02)
        data = loader(normal(SAMPLES, 6))
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            volume = torch.zeros(len(x))
            for layer in model:
                x, change = layer(x)
                volume = volume + change
            loss = (0.5 * x.pow(2).sum(1) - volume).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = nn.ModuleList(built(Coupling, seed=i) for i in range(3))
        optimizer = sgd(model.parameters(), 0.02)
        data = loader(normal(SAMPLES, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            volume = torch.zeros(len(x))
            for layer in model:
                x, change = layer(x)
                volume = volume + change
            return (0.5 * x.pow(2).sum(1) - volume).mean()

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ContinuousFlow(Script):
    """A neural differential equation with the exact trace of its Jacobian inside the loss."""

    follows = "rtqichen/torchdiffeq cnf"
    needs = "D"

    @staticmethod
    def plain():
        model = mlp(2, 8, 2)
        optimizer = sgd(model.parameters(), 0.05)
        data = loader(normal(SAMPLES, 2))
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            z, volume = x.clone().requires_grad_(), torch.zeros(len(x))
            for _ in range(3):
                speed = model(z)
                for i in range(2):
                    (row,) = torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)
                    volume = volume + row[:, i] / 3
                z = z + speed / 3
            loss = (0.5 * z.pow(2).sum(1) - volume).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(2, 8, 2)
        optimizer = sgd(model.parameters(), 0.05)
        data = loader(normal(SAMPLES, 2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            z, volume = x.clone().requires_grad_(), torch.zeros(len(x))
            for _ in range(3):
                speed = model(z)
                for i in range(2):
                    (row,) = torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)
                    volume = volume + row[:, i] / 3
                z = z + speed / 3
            return (0.5 * z.pow(2).sum(1) - volume).mean()

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
