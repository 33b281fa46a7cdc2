"""The user's optimizer as plain data, from which a server builds its own: no object is sent.

A partition is flat and knows nothing of the matrix that its values come from. So an optimizer must
treat each value by itself, as most do. One that uses rows, norms or the full tensor is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError, StrategyRefused
from shoal.optim.traits import ELEMENTWISE_OPTIMIZERS, declaration, is_elementwise

Setting = float | int | bool | str | None | list[float]
Settings = dict[str, Setting]
"""Settings of one optimizer group: learning rate, momentum, betas and the like, as JSON values."""


class OptimizerSpec(NamedTuple):
    """Class and settings of the user's optimizer.

    Attributes:
        settings: of each optimizer group.
    """

    kind: type[Optimizer]
    settings: list[Settings]

    def build(self, parameters: Iterable[nn.Parameter], group: int) -> Optimizer:
        """Build an optimizer without state for parameters of one group."""
        make: Any = self.kind
        # Some settings of a group, such as `initial_lr` of a schedule, are no arguments.
        accepted = inspect.signature(self.kind.__init__).parameters
        arguments = {
            name: _from_json(value)
            for name, value in self.settings[group].items()
            if name in accepted
        }
        if "foreach" in arguments:
            # It may write into gradients, which a worker may have to send again.
            arguments["foreach"] = False
        optimizer: Optimizer = make(list(parameters), **arguments)
        update(optimizer, self.settings[group])
        return optimizer


def recipe_of(optimizer: Optimizer) -> OptimizerSpec:
    """Return class and settings of an optimizer.

    Raises:
        StrategyRefused: the optimizer does not treat each value by itself, or is unknown and does
            not declare that it does; or no server can build one like it.
    """
    kind = type(optimizer)
    if not is_elementwise(kind):
        raise StrategyRefused(
            f"{kind.__name__} cannot run on parameter servers: they hold pieces of parameters, and "
            "only an optimizer that treats every number by itself gives the same result on pieces. "
            f"Use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}. "
            f"{declaration(kind, 'elementwise')}".rstrip()
        )
    name_of_kind(kind)
    spec = OptimizerSpec(kind, [settings_of(group) for group in optimizer.param_groups])
    _check_built_alike(optimizer, spec)
    return spec


def _check_built_alike(optimizer: Optimizer, spec: OptimizerSpec) -> None:
    """Raise StrategyRefused if an optimizer that is built of the spec has other settings."""
    name = spec.kind.__name__
    cure = (
        "Servers build their own of the numbers and texts in param_groups: let __init__ take each "
        f"by its name there, {name}(params, lr=0.1, scale=2.0) with defaults=dict(lr=lr, "
        "scale=scale), and step() read them from the group."
    )
    known = vars(Optimizer([nn.Parameter(torch.zeros(1))], {})).keys()
    for number, group in enumerate(optimizer.param_groups):
        try:
            built = spec.build([nn.Parameter(torch.zeros(1))], number)
        except Exception as error:
            raise StrategyRefused(
                f"{name} cannot be built on parameter servers ({error}). {cure}"
            ) from error
        other = [
            k
            for k in group
            if k not in ("params", "foreach") and not _are_same(k, group, built.param_groups[0])
        ]
        other += [
            k for k in vars(built).keys() - known if not _are_same(k, vars(optimizer), vars(built))
        ]
        if other:
            raise StrategyRefused(
                f"{name} on parameter servers would have other values than here of: "
                f"{', '.join(other)}. {cure}"
            )


def _are_same(key: str, here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Return False if one of two values can be compared, and they differ."""
    mine, built = here.get(key), there.get(key)
    if _is_plain(mine) and _is_plain(built):
        return _to_json(mine) == _to_json(built)
    return not (_is_plain(mine) or _is_plain(built))


def name_of_kind(kind: type[Optimizer]) -> str:
    """Return `module:class`, by which servers import an optimizer.

    Raises: StrategyRefused: the class is in the script itself, or in a function.
    """
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise StrategyRefused(
            f"{kind.__name__} is a class of the script itself, which servers do not run. Put it "
            "at the top of a module that the script imports."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def kind_of_name(name: str) -> type[Optimizer]:
    """Import the class of `name_of_kind`. Raises ConfigError."""
    module, _, qualname = name.partition(":")
    try:
        kind: type[Optimizer] = getattr(import_module(module), qualname)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the optimizer {qualname} of {module} cannot be imported on a server host "
            f"({error}). Copy its file there, or name its directory by --env PYTHONPATH=..."
        ) from None
    return kind


def settings_of(group: dict[str, Any]) -> Settings:
    """Return the settings of an optimizer group that JSON can hold."""
    return {
        name: _to_json(value)
        for name, value in group.items()
        if name != "params" and _is_plain(value)
    }


def update(optimizer: Optimizer, settings: Settings) -> None:
    """Set the settings of a server's optimizer, which has one group."""
    optimizer.param_groups[0].update(
        {name: _from_json(value) for name, value in settings.items() if name != "foreach"}
    )


def _is_plain(value: Any) -> bool:
    """Return whether a setting is None, a text, a number, a scalar tensor, or a list of the latter
    two.
    """
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) and not isinstance(item, str | None) for item in value)
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, Tensor) and value.dim() == 0)
    )


def _to_json(value: Any) -> Setting:
    if isinstance(value, (tuple, list)):
        return [float(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def _from_json(value: Setting) -> Any:
    return tuple(value) if isinstance(value, list) else value
