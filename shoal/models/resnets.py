"""torchvision's ResNets, changed: ResNet-18 for images of 32x32 pixels, and BoTNet, a ResNet-50
whose last three blocks attend to the whole image instead of convolving it.

    1x1 convolution ── attention over all positions, 4 heads ── 1x1 convolution ── + input

Attention knows positions relative to each other: a logit is query (key + row offset + column
offset), with a learned vector for each offset.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from shoal.models.model_options import no_image, refuse


def cifar_resnet18(
    *, num_classes: int, input_shape: tuple[int, ...], zero_init_residual: bool = False
) -> nn.Module:
    """Return torchvision's ResNet-18 with a stem of one 3x3 convolution, which keeps the size of
    the image.

    The usual stem is made for 224x224 pixels and would reduce 32x32 pixels to 8x8. The model has
    11,173,962 parameters for 3 channels and 10 classes.

    Args:
        num_classes: width of the output.
        input_shape: (channels, height, width).
        zero_init_residual: each residual branch starts as zero.

    Raises: ConfigError: samples that are no images.
    Source: He et al., CVPR 2016, section 4.2.
    """
    # Imported here: the import takes seconds, and other models do not need it.
    from shoal.platform.torchvision_import import torchvision

    refuse(no_image("cifar_resnet18", input_shape))
    model: nn.Module = torchvision.models.resnet18(
        weights=None, num_classes=num_classes, zero_init_residual=zero_init_residual
    )
    model.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


HEADS = 4
REDUCTION = 16  # of each side of the image, before the last stage


class RelativeAttention2d(nn.Module):
    """Self-attention over the positions of a feature map.

    Args:
        channels: of input and output, a multiple of `heads`.
        height, width: of the feature map.
    """

    def __init__(self, channels: int, height: int, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        scale = (channels // heads) ** -0.5
        self.row_offsets = nn.Parameter(torch.randn(2 * height - 1, channels // heads) * scale)
        self.column_offsets = nn.Parameter(torch.randn(2 * width - 1, channels // heads) * scale)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> the same shape."""
        batch, channels, height, width = x.shape
        shape = (batch, self.heads, channels // self.heads, height * width)
        query, key, value = (part.reshape(shape) for part in self.to_qkv(x).chunk(3, dim=1))
        query = query / math.sqrt(channels // self.heads)
        places = query.unflatten(-1, (height, width))
        rows = torch.einsum("bndhw,hid->bnhwi", places, self.row_offsets[_offsets(height, x)])
        columns = torch.einsum("bndhw,wjd->bnhwj", places, self.column_offsets[_offsets(width, x)])
        relative = rows.unsqueeze(-1) + columns.unsqueeze(-2)  # (b, n, h, w, i, j)
        logits = query.transpose(-2, -1) @ key + relative.flatten(4).flatten(2, 3)
        attended: Tensor = logits.softmax(dim=-1) @ value.transpose(-2, -1)
        return attended.transpose(-2, -1).reshape(x.shape)


def _offsets(size: int, x: Tensor) -> Tensor:
    """Return the index of the offset between each two of `size` positions, (size, size)."""
    positions = torch.arange(size, device=x.device)
    return positions[None, :] - positions[:, None] + size - 1


def botnet50(*, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return torchvision's ResNet-50 with attention in its last stage, which keeps the resolution.

    It has 20,859,176 parameters for 3 channels, 224x224 pixels and 1,000 classes; the paper says
    20.8 million.

    Args:
        num_classes: width of the output.
        input_shape: (channels, height, width); the learned offsets fit images of this size only.

    Raises: ConfigError: samples that are no images.
    Source: Srinivas et al., CVPR 2021, section 3.
    """
    # Imported here: the import takes seconds, and other models do not need it.
    from shoal.platform.torchvision_import import torchvision

    refuse(no_image("botnet50", input_shape))
    channels, *sides = input_shape
    height, width = (-(-side // REDUCTION) for side in sides)
    model: nn.Module = torchvision.models.resnet50(
        weights=None,
        num_classes=num_classes,
        zero_init_residual=True,
        replace_stride_with_dilation=[False, False, True],  # the last stage has no stride
    )
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    for block in cast(nn.Sequential, model.layer4):
        block.conv2 = RelativeAttention2d(cast(nn.Conv2d, block.conv2).out_channels, height, width)
    return model
