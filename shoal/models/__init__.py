"""Models by name: small models of Shoal, the user's, torchvision's and timm's.

A new model is one file, and one line in `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from shoal.errors import ConfigError, did_you_mean, raise_problems
from shoal.models import zoo
from shoal.models.gpt import GPT
from shoal.models.lstm import LSTM
from shoal.models.mlp import MLP
from shoal.models.model_options import parameters_of, problems_of
from shoal.models.residual_cnn import ResidualCNN
from shoal.models.resnets import botnet50, cifar_resnet18

Builder = Callable[..., nn.Module]

MODELS: dict[str, Builder] = {
    "mlp": MLP,
    "residual_cnn": ResidualCNN,
    "cifar_resnet18": cifar_resnet18,
    "botnet50": botnet50,
    "lstm": LSTM,
    "gpt": GPT,
}


def build(
    name: str,
    num_classes: int,
    input_shape: tuple[int, ...],
    options: Mapping[str, Any],
    extra: Mapping[str, Builder] | None = None,
) -> nn.Module:
    """Return a model on the CPU in float32, with fresh weights from torch's default generator.

    Args:
        name: searched in this order: `extra`, `MODELS`, torchvision's classifiers, `timm:NAME`,
            timm's other names.
        num_classes: classes, or the size of the vocabulary.
        input_shape: of one sample: (channels, height, width) of an image, (time,) of a text.
        options: further keyword arguments of the builder.
        extra: builders of the user. Each is called as `builder(num_classes=..., input_shape=...,
            **options)`.

    Raises:
        ConfigError: an unknown name, or options or samples that the model does not accept.
    """
    ours = {**MODELS, **(extra or {})}
    if name in ours:
        return _build_ours(name, ours[name], num_classes, input_shape, options)
    if name.startswith("timm:"):
        return zoo.build_timm(name.removeprefix("timm:"), num_classes, input_shape, options)
    torchvision_names = zoo.torchvision_names()
    if name in torchvision_names:
        return zoo.build_torchvision(name, num_classes, input_shape, options)
    timm_names = zoo.timm_names()
    if name in timm_names:
        return zoo.build_timm(name, num_classes, input_shape, options)
    # With no similar name, list only our own models: there are more than a thousand others.
    close = get_close_matches(name, [*ours, *torchvision_names, *timm_names])
    known = close or [*ours, "torchvision's (resnet18...)", "timm:NAME"]
    raise ConfigError(f"model.name: there is no model '{name}'; {did_you_mean(name, known)}")


def _build_ours(
    name: str,
    builder: Builder,
    num_classes: int,
    input_shape: tuple[int, ...],
    options: Mapping[str, Any],
) -> nn.Module:
    given = {"num_classes": num_classes, "input_shape": input_shape}
    parameters = parameters_of(builder)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not open_ended and not given.keys() <= parameters.keys():
        takes = ", ".join(parameters) or "nothing"
        raise ConfigError(
            f"model.name: {name} must take num_classes and input_shape by keyword; it takes {takes}"
        )
    raise_problems(problems_of(name, parameters, options, given))
    return builder(**given, **options)
