"""The user's optimizer, told in words, so that a server can make its own: no object travels.

A server steps runs of numbers that know nothing of the matrix they were cut from. That is right for
an optimizer that treats every number by itself, as most do; one that looks at rows, norms or the
whole is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import StrategyRefused

ELEMENTWISE_OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip

Setting = float | int | bool | None | list[float]
Settings = dict[str, Setting]
"""Of one optimizer group: learning rate, momentum, betas and the like, as JSON values."""


class OptimizerSpec(NamedTuple):
    """How to make an optimizer like the user's."""

    kind: type[Optimizer]
    settings: list[Settings]  # of each group

    def build(self, parameters: Iterable[nn.Parameter], group: int) -> Optimizer:
        """An optimizer for some parameters of one group, with no state yet."""
        maker: Any = self.kind
        known = inspect.signature(self.kind.__init__).parameters
        own = {
            name: _python(value) for name, value in self.settings[group].items() if name in known
        }
        if "foreach" in own:
            own["foreach"] = (
                False  # it may write into gradients, which a worker may have to send again
            )
        made: Optimizer = maker(list(parameters), **own)
        update(made, self.settings[group])
        return made


def recipe_of(optimizer: Optimizer) -> OptimizerSpec:
    """Raises StrategyRefused where the optimizer does not treat every number by itself, or
    cannot be told in words.
    """
    kind = type(optimizer)
    ours = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE_OPTIMIZERS
    if not ours and not getattr(kind, "elementwise", False):
        raise StrategyRefused(
            f"{kind.__name__} cannot run on parameter servers: they hold pieces of parameters, and "
            "only an optimizer "
            "that treats every number by itself gives the same result on pieces. Use one of "
            f"{', '.join(ELEMENTWISE_OPTIMIZERS)}; "
            "one of your own that does so says it by a class attribute: elementwise = True."
        )
    return OptimizerSpec(kind, [settings_of(group) for group in optimizer.param_groups])


def settings_of(group: dict[str, Any]) -> Settings:
    """What a schedule may have changed in a group, as JSON values."""
    return {
        name: _json(value) for name, value in group.items() if name != "params" and _is_plain(value)
    }


def update(optimizer: Optimizer, settings: Settings) -> None:
    """Give the one group of a server's optimizer these settings."""
    optimizer.param_groups[0].update(
        {name: _python(v) for name, v in settings.items() if name != "foreach"}
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) and item is not None for item in value)
    return (
        value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, Tensor) and value.dim() == 0)
    )


def _json(value: Any) -> Setting:
    if isinstance(value, (tuple, list)):
        return [float(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def _python(value: Setting) -> Any:
    return tuple(value) if isinstance(value, list) else value
