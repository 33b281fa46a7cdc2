"""`torch.save(model, file)` where a strategy has changed the model: an error that names run.save.

Elsewhere torch writes the user's model as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.run.guards.full_state import SAVE
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch, replaced_by
from shoal.run.state_access import is_access_by_shoal


def guard_saved_modules(guarded: GuardedModels) -> Iterator[Removable]:
    """Look at the modules that `torch.save` is given; yield handles."""
    local_model = guarded.local_model
    is_changed = local_model.is_partial or local_model.has_sharded_params
    is_changed = is_changed or local_model.pass_traits.recomputes
    if is_changed or local_model.remote_optimizer is not None:
        yield _saved.add(guarded)


def _make_save(patch: ProcessWidePatch, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        saved = [leaf for leaf in tree_leaves(obj) if isinstance(leaf, nn.Module)]
        if saved and not is_access_by_shoal():
            inside = {module for each in saved for module in each.modules()}
            for guarded in patch.active:
                if any(inside & {*model.modules()} for model in guarded.models.values()):
                    raise UsageError(
                        f"torch.save(model){call_site()}{guarded.under}: the model has parts of "
                        f"the strategy inside, or lacks parts of its own. {SAVE}"
                    )
        return original(obj, *args, **kwargs)

    return save


def _replace(make: Callable[[Any], Any]) -> Callable[[], None]:
    places = (torch, torch.serialization)
    original = torch.save
    replacement = make(original)
    for place in places:
        place.save = replacement  # type: ignore[attr-defined]

    def put_back() -> None:
        for place in places:
            place.save = original  # type: ignore[attr-defined]

    return put_back


_saved = ProcessWidePatch(replaced_by(_replace, _make_save))
