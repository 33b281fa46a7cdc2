"""`torch.func.functional_call` of a prepared model with other weights than its own.

Strategies that gather or cut a model's weights would put them in the place of those that
were given, and a module that computes again would take its own. Where every rank holds the model as
it is, other weights are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.replaced_functions import replace_functional_call
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch, replaced_by


def guard_functional_call(guarded: GuardedModels) -> Iterator[Removable]:
    """Refuse other weights where a strategy handles the model's own; yield handles."""
    local_model = guarded.local_model
    handles_weights = local_model.is_partial or local_model.has_sharded_params
    if handles_weights or local_model.pass_traits.recomputes:
        yield _functional_call.add(guarded)


def _make_functional_call(patch: ProcessWidePatch, original: Callable[..., Any]) -> Any:
    def functional_call(module: nn.Module, weights: Any, *args: Any, **kwargs: Any) -> Any:
        inside = {id(inner) for inner in module.modules()}
        for guarded in patch.active:
            for prefix, model in guarded.models.items():
                if any(id(inner) in inside for inner in model.modules()):
                    _check_own_weights(guarded, prefix, module, weights)
        return original(module, weights, *args, **kwargs)

    return functional_call


def _check_own_weights(
    guarded: GuardedModels, prefix: str, module: nn.Module, weights: Any
) -> None:
    """Raise UsageError if a weight is not the one that the module has under that name."""
    own: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    parts = weights if isinstance(weights, (tuple, list)) else [weights]
    other = [name for part in parts for name, value in part.items() if own.get(name) is not value]
    if other:
        raise UsageError(
            f"functional_call{call_site()}: {prefix}{other[0]} is given as another tensor than "
            f"the model's own;{guarded.under or ' here'} the strategy would put its own in the "
            "place of it. Use ddp."
        )


_functional_call = ProcessWidePatch(replaced_by(replace_functional_call, _make_functional_call))
