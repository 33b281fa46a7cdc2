"""A small residual network for small images; with its defaults about 300,000 parameters.

The default norm is GroupNorm, whose statistics are those of one sample. BatchNorm's statistics are
those of one rank's batch, so 4 ranks of 32 samples differ from one device with 128 samples. With
GroupNorm they are equal up to rounding.

Sources: He et al., CVPR 2016 (residual blocks); Wu & He, ECCV 2018 (GroupNorm); Goyal et al.,
arXiv:1706.02677, section 5.1 (each residual branch starts as zero)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.model_options import no_image, refuse

Norm = Callable[[int], nn.GroupNorm | nn.BatchNorm2d]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them. With stride 2 the first convolution halves
    height and width.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(channels_out))

    def forward(self, images: Tensor) -> Tensor:
        """Float (batch, channels_in, height, width) -> (batch, channels_out, height / stride,
        width / stride).
        """
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(images)))))
        return F.relu(self.shortcut(images) + residual)


class ResidualCNN(nn.Module):
    """Stem, stages of residual blocks, mean over the image, linear head. Each stage but the first
    halves the image.

    Args:
        num_classes: width of the output.
        input_shape: (channels, height, width), 8x8 pixels or more.
        widths: channels of each stage.
        blocks: residual blocks in each stage.
        norm: "group" for GroupNorm, "batch" for BatchNorm.
        groups: groups of channels in a GroupNorm; every width must be a multiple.

    Raises: ConfigError: samples that are no images, images too small for the stages, widths that
    groups do not divide."""

    def __init__(
        self,
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        widths: Sequence[int] = (32, 64, 128),
        blocks: int = 1,
        norm: Literal["group", "batch"] = "group",
        groups: int = 8,
    ) -> None:
        super().__init__()
        _check(input_shape, widths, blocks, groups if norm == "group" else 1)
        make_norm: Norm = partial(nn.GroupNorm, groups) if norm == "group" else nn.BatchNorm2d
        stem = nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, make_norm(widths[0]), nn.ReLU())
        self.stages = nn.Sequential()
        for width_in, width_out in pairwise([widths[0], *widths]):
            first = ResidualBlock(width_in, width_out, 2 if len(self.stages) else 1, make_norm)
            others = [ResidualBlock(width_out, width_out, 1, make_norm) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(first, *others))
        self.head = nn.Linear(widths[-1], num_classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        """Float (batch, channels, height, width) -> logits (batch, num_classes)."""
        features = self.stages(self.stem(images))
        # Not AdaptiveAvgPool2d: its backward pass on CUDA sums in random order, and runs must
        # repeat bit for bit.
        return self.head(features.mean((2, 3)))  # type: ignore[no-any-return]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, ResidualBlock):
                # Every block starts as its shortcut, which makes the first steps stable at a large
                # learning rate.
                nn.init.zeros_(module.norm2.weight)


def _check(input_shape: tuple[int, ...], widths: Sequence[int], blocks: int, groups: int) -> None:
    uneven = [width for width in widths if width < 1 or (groups > 0 and width % groups)]
    # The last stage needs 2x2 pixels or more for its 3x3 convolutions.
    side = max(8, 2 ** len(widths))
    too_small = len(input_shape) == 3 and min(input_shape[1:]) < side
    refuse(
        no_image("residual_cnn", input_shape),
        (
            too_small,
            f"options.widths: {len(widths)} stages take images from {side}x{side}, not "
            f"{tuple(input_shape)}",
        ),
        (not widths, "options.widths: there are none; give one per stage, as in [32, 64, 128]"),
        (blocks < 1, f"options.blocks: {blocks}; each stage needs 1 or more"),
        (groups < 1, f"options.groups: {groups}; must be 1 or more"),
        (bool(uneven), f"options.widths: {uneven} must be positive multiples of groups={groups}"),
    )
