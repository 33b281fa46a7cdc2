"""Models, data and losses that every strategy is checked on. One row an experiment.

Each data set has 31 samples in random order, in global batches of 10, 10, 10 and 1: with several
ranks the last one leaves some without a sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shoal.models import build
from shoal.verification.matrix_models import Encoder, UNet
from shoal.verification.trajectory import Experiment

SAMPLES, BATCH = 31, 10
WORDS = 18
"""Of the GPTs: one more than there are, so that the vocabulary can be cut in two."""


def images(side: int = 8) -> TensorDataset:
    """Square images of ten classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, side, side, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


def tokens() -> TensorDataset:
    """Sequences of 13 tokens; of different length, so that a mean over rows would weigh their
    tokens wrongly.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 17, (SAMPLES, 13), generator=generator)
    y = x.roll(-1, dims=1)
    y[torch.arange(13) > torch.randint(3, 13, (SAMPLES, 1), generator=generator)] = -100
    return TensorDataset(x, y)


def pairs_of_images() -> TensorDataset:
    """Two inputs and a target."""
    x, y = images().tensors
    return TensorDataset(x, x.flip(0), y)


class Named(Dataset):
    """Samples whose input is a dict."""

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


def mean_over_tokens(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that counts for itself: ignored tokens weigh nothing."""
    total = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (target != -100).sum()


def mlp() -> nn.Module:
    return build("mlp", 10, (1, 8, 8), {"hidden": (12,)})


def cnn() -> nn.Module:
    return build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "groups": 2})


def cnn_with_batchnorm() -> nn.Module:
    return build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "norm": "batch"})


def lstm() -> nn.Module:
    return build("lstm", 17, (13,), {"width": 8, "layers": 2})


def gpt() -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 2, "heads": 2})


def gpt_untied() -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 2, "heads": 2, "tied": False})


def resnet18() -> nn.Module:
    """Its four stages of two blocks, with few channels and GroupNorm."""
    return build(
        "residual_cnn", 10, (1, 16, 16), {"widths": (4, 4, 8, 8), "blocks": 2, "groups": 2}
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Dropout(0.3), nn.Linear(12, 10))


class TimeFirst(nn.Module):
    """An LSTM that takes (time, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(17, 8),
            nn.LSTM(8, 8, num_layers=2),
            nn.Linear(8, 17),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(x).transpose(0, 1))
        logits: Tensor = self.head(hidden).transpose(0, 1)
        return logits


class UnusualParameters(nn.Module):
    """A parameter that is never used, one that is frozen, one that is shared by two layers, and
    a scalar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 10)
        self.first, self.second, self.unused = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(self.embed(x.flatten(1))))) * self.scale
        return hidden


class TwoInputs(nn.Module):
    """Takes two tensors, or a dict of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        left, right = (x["left"], x["right"]) if y is None else (x, y)
        mixed: Tensor = self.left(left.flatten(1)) * self.right(right.flatten(1))
        return mixed


EXPERIMENTS = {
    "mlp": Experiment(mlp, image_loader, F.cross_entropy),
    "cnn": Experiment(cnn, image_loader, F.cross_entropy),
    "cnn with BatchNorm": Experiment(cnn_with_batchnorm, image_loader, F.cross_entropy),
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
