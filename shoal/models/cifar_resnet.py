"""ResNet-18 for images of 32x32 pixels."""

from __future__ import annotations

from torch import nn

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
