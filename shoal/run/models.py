"""The prepared models of a run as one module, in which parameters have one name each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class ModelGroup(nn.Module):
    """Several models that are trained together: `model0`, `model1`, ... in the order of `prepare`.

    It is never called, and has no forward function: the user's function calls the models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, model in enumerate(models):
            self.add_module(f"model{index}", model)


def as_one_module(models: Sequence[nn.Module]) -> nn.Module:
    """Return the only model, or a group of several."""
    return models[0] if len(models) == 1 else ModelGroup(models)


def named_models(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the models by the prefix of their parameters' names in `as_one_module`."""
    if len(models) == 1:
        return {"": models[0]}
    return {f"model{index}.": model for index, model in enumerate(models)}


def is_trained(model: nn.Module) -> bool:
    """Return True if a parameter of the model requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def trained_names(root: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {name for name, parameter in root.named_parameters() if parameter.requires_grad}
