"""Models of torchvision and timm by name, with fresh weights.

Both libraries take seconds to import, so each function imports the library that it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from shoal.errors import ConfigError, did_you_mean, raise_problems
from shoal.models.model_options import is_plain, no_image, parameters_of, problems_of, refuse

# Options that torchvision's functions read themselves. The signature of the model's class has the
# others.
READ_BY_FUNCTION = {
    "MobileNetV3": {"width_mult": float, "reduced_tail": bool, "dilated": bool},
}
# With their auxiliary heads these two models return three outputs in training, but the losses here
# take one.
DEFAULTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def torchvision_names() -> list[str]:
    """Return torchvision's classifiers. Models of other tasks (detection, video...) need other
    losses.
    """
    from shoal.platform.torchvision_import import torchvision

    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def build_torchvision(
    name: str, num_classes: int, input_shape: tuple[int, ...], options: Mapping[str, Any]
) -> nn.Module:
    """Build one of `torchvision_names()`.

    Raises: ConfigError: images without 3 channels, or options that the model does not take.
    """
    from shoal.platform.torchvision_import import torchvision

    problems = problems_of(name, _torchvision_parameters(name), options, given={"num_classes"})
    if len(input_shape) != 3 or input_shape[0] != 3:
        problems.insert(
            0,
            f"model.name: {name} takes images (3, height, width), but a sample is "
            f"{tuple(input_shape)}",
        )
    raise_problems(problems)
    try:
        model: nn.Module = torchvision.models.get_model(
            name, weights=None, num_classes=num_classes, **{**DEFAULTS.get(name, {}), **options}
        )
    except (TypeError, ValueError) as error:
        raise _refused(name, options, error) from error
    return model


def _torchvision_parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of plain types of the class that torchvision's function `name`
    builds.
    """
    from shoal.platform.torchvision_import import torchvision

    function = torchvision.models.get_model_builder(name)
    model_class = inspect.signature(function, eval_str=True).return_annotation
    known = {
        key: p.annotation for key, p in parameters_of(model_class).items() if is_plain(p.annotation)
    }
    known |= READ_BY_FUNCTION.get(model_class.__name__, {})
    # default=None: no option is required, because the function fills in the class's arguments.
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        key: inspect.Parameter(key, kind, default=None, annotation=annotation)
        for key, annotation in known.items()
    }


def timm_names() -> list[str]:
    """Return all names of timm's models; none where timm is not installed."""
    if find_spec("timm") is None:
        return []
    # timm imports torchvision, and this module makes torchvision importable first.
    import_module("shoal.platform.torchvision_import")
    names: list[str] = import_module("timm").list_models()
    return names


def build_timm(
    name: str, num_classes: int, input_shape: tuple[int, ...], options: Mapping[str, Any]
) -> nn.Module:
    """Build a model of timm, with as many input channels as the data have.

    Raises: ConfigError: timm is not installed, has no such model, or does not accept the options
    or the samples' shape."""
    names = timm_names()
    if not names:
        raise ConfigError(
            f"model.name: {name} is timm's, which is not installed; pip install 'shoal[timm]'"
        )
    if name not in names:
        known = get_close_matches(name, names) or ["those that timm.list_models() gives"]
        raise ConfigError(f"model.name: timm has no model '{name}'; {did_you_mean(name, known)}")
    refuse(no_image(name, input_shape))
    given = {"num_classes": num_classes, "in_chans": input_shape[0]}
    try:
        model: nn.Module = import_module("timm").create_model(
            name, pretrained=False, **given, **options
        )
    except (TypeError, ValueError) as error:
        raise _refused(name, options, error) from error
    return model


def _refused(name: str, options: Mapping[str, Any], error: Exception) -> ConfigError:
    return ConfigError(f"model.options: {name} does not take {dict(options)}: {error}")
