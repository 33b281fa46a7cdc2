"""Models of the matrix that are written without a thought of strategies.

A U-Net has shortcuts across all of its layers, and torch's own encoder is not ours to change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
