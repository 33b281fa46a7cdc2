"""Models, data and losses with which every strategy is verified.

Each data set has 31 samples in random order, in global batches of 10, 10, 10 and 1. With several
ranks the last batch leaves some ranks without a sample. Weights are random and data are noise: the
proof compares numbers, so a model need not learn anything.

Some models are written here without a thought of strategies: a U-Net has shortcuts across all of
its layers, and torch's own encoder is not ours to change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shoal.models import build
from shoal.strategies.loss_terms import Counted, counted
from shoal.verification.trajectory import Experiment


class UNet(nn.Module):
    """A U-Net: down, down, up, up, with shortcuts between feature maps of equal size.

    Source: Ronneberger et al., MICCAI 2015; with GroupNorm, and a mean over the image at the end.
    """

    def __init__(self, width: int = 4, num_classes: int = 10) -> None:
        super().__init__()
        self.down1 = _convolution(1, width)
        self.down2 = _convolution(width, 2 * width)
        self.middle = _convolution(2 * width, 2 * width)
        self.up2 = _convolution(4 * width, width)
        self.up1 = _convolution(2 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, 1, height, width) to logits (batch, num_classes)."""
        large = self.down1(images)
        small = self.down2(F.max_pool2d(large, 2))
        x = self.middle(F.max_pool2d(small, 2))
        x = self.up2(torch.cat([F.interpolate(x, size=small.shape[-2:]), small], 1))
        x = self.up1(torch.cat([F.interpolate(x, size=large.shape[-2:]), large], 1))
        logits: Tensor = self.head(x).mean((2, 3))
        return logits


class Encoder(nn.Module):
    """Embedding, torch's own TransformerEncoder, linear head: a label for each token."""

    def __init__(self, vocabulary: int = 17, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, vocabulary)."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    # ReLU in place, as most people write it. A pipeline stage may begin with it and must not change
    # the activation that it received.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(2, channels_out),
        nn.ReLU(inplace=True),
    )


SAMPLES = 31
BATCH = 10
TOKENS = 17
WORDS = 18
"""Vocabulary of the GPTs: one more than the data have, so that two ranks can divide it."""


def images(side: int = 8) -> TensorDataset:
    """Return square images of ten classes, float64 (31, 1, side, side)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, side, side, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


def tokens() -> TensorDataset:
    """Return sequences of 13 tokens, int64 (31, 13), with targets that are -100 after their end.

    The sequences have different lengths, so a mean over sequences would weigh tokens wrongly.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, TOKENS, (SAMPLES, 13), generator=generator)
    y = x.roll(-1, dims=1)
    y[torch.arange(13) > torch.randint(3, 13, (SAMPLES, 1), generator=generator)] = -100
    return TensorDataset(x, y)


def pairs_of_images() -> TensorDataset:
    """Return samples with two inputs and a target."""
    x, y = images().tensors
    return TensorDataset(x, x.flip(0), y)


class Named(Dataset):
    """The samples of `pairs_of_images`, with a dict as their input."""

    def __init__(self) -> None:
        self.left, self.right, self.target = pairs_of_images().tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"left": self.left[index], "right": self.right[index]}, self.target[index]


def image_loader() -> DataLoader:
    return _loader(images())


def larger_image_loader() -> DataLoader:
    return _loader(images(16))


def token_loader() -> DataLoader:
    return _loader(tokens())


def pair_loader() -> DataLoader:
    return _loader(pairs_of_images())


def named_loader() -> DataLoader:
    return _loader(Named())


def _loader(dataset: Dataset) -> DataLoader:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


def mean_over_tokens(logits: Tensor, target: Tensor) -> Counted:
    """Return the mean loss of tokens, without those whose target is -100."""
    total = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return counted(total, (target != -100).sum())


def mlp() -> nn.Module:
    return build("mlp", 10, (1, 8, 8), {"hidden": (12,)})


def cnn() -> nn.Module:
    return build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "groups": 2})


def cnn_with_batchnorm() -> nn.Module:
    return build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "norm": "batch"})


def lstm() -> nn.Module:
    return build("lstm", TOKENS, (13,), {"width": 8, "layers": 2})


def gpt() -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 2, "heads": 2})


def gpt_untied() -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 2, "heads": 2, "tied": False})


def resnet18() -> nn.Module:
    """Return a ResNet-18: four stages of two blocks, but few channels, and GroupNorm."""
    return build(
        "residual_cnn", 10, (1, 16, 16), {"widths": (4, 4, 8, 8), "blocks": 2, "groups": 2}
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Dropout(0.3), nn.Linear(12, 10))


class TimeFirst(nn.Module):
    """An LSTM whose batch is in dimension 1 (batch_first=False)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(x).transpose(0, 1))
        logits: Tensor = self.head(hidden).transpose(0, 1)
        return logits


class UnusualParameters(nn.Module):
    """A model with an unused parameter, a frozen one, a tied one and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 10)
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.unused = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(self.embed(x.flatten(1))))) * self.scale
        return hidden


class TwoInputs(nn.Module):
    """A model that takes two tensors, or a dict of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 10)
        self.right = nn.Linear(64, 10)

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        left, right = (x["left"], x["right"]) if y is None else (x, y)
        mixed: Tensor = self.left(left.flatten(1)) * self.right(right.flatten(1))
        return mixed


# The names are columns of docs/verified.md and keys of verified.json.
EXPERIMENTS = {
    "mlp": Experiment(mlp, image_loader, F.cross_entropy),
    "cnn": Experiment(cnn, image_loader, F.cross_entropy),
    "cnn with BatchNorm": Experiment(cnn_with_batchnorm, image_loader, F.cross_entropy),
    "cnn with BatchNorm of all ranks": Experiment(
        cnn_with_batchnorm, image_loader, F.cross_entropy, sync_batchnorm=True
    ),
    "ResNet-18": Experiment(resnet18, larger_image_loader, F.cross_entropy),
    "U-Net": Experiment(UNet, image_loader, F.cross_entropy),
    "lstm": Experiment(lstm, token_loader, mean_over_tokens),
    "lstm, time first": Experiment(TimeFirst, token_loader, mean_over_tokens),
    "gpt": Experiment(gpt, token_loader, mean_over_tokens),
    "gpt, untied": Experiment(gpt_untied, token_loader, mean_over_tokens),
    "TransformerEncoder": Experiment(Encoder, token_loader, mean_over_tokens),
    "unused, frozen, shared and scalar parameters": Experiment(
        UnusualParameters, image_loader, F.cross_entropy
    ),
    "dropout": Experiment(dropout, image_loader, F.cross_entropy),
    "two inputs": Experiment(TwoInputs, pair_loader, F.cross_entropy),
    "dict of inputs": Experiment(TwoInputs, named_loader, F.cross_entropy),
}
