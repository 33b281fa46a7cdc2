"""A multilayer perceptron: the smallest model on which every strategy is verified."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

from torch import Tensor, nn

from shoal.models.model_options import refuse

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class MLP(nn.Module):
    """Flatten, then linear layers with an activation after each but the last.

    Args:
        num_classes: width of the output.
        input_shape: shape of one sample, with any number of dims.
        hidden: widths of the hidden layers; an empty list gives a linear classifier.
        activation: "gelu" or "relu".

    Raises: ConfigError: a width below 1.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        hidden: Sequence[int] = (256, 256),
        activation: Literal["gelu", "relu"] = "gelu",
    ) -> None:
        super().__init__()
        refuse(
            (
                any(width < 1 for width in hidden),
                f"options.hidden: {list(hidden)} has a width below 1",
            )
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise([prod(input_shape), *hidden]):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1] if hidden else prod(input_shape), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Float (batch, *input_shape) -> logits (batch, num_classes)."""
        return self.head(self.layers(images))  # type: ignore[no-any-return]
