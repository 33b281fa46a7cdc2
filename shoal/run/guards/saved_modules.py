"""`torch.save(model, file)`: a file of the user's model alone, or an error that names run.save.

The file holds the model as it was before `prepare`: without the hooks of guards and strategies, so
that it can be loaded where there is no Shoal. Where this rank holds a part of the model, nothing is
written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.platform.torch_private.pytree import tree_leaves
from shoal.run.guards.full_state import check_owns_values
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch, replaced_by
from shoal.run.state_access import is_access_by_shoal

_OWN_FORWARD = "forward"
_PACKAGE = f"{Path(__file__).parents[2]}/"


def guard_saved_modules(guarded: GuardedModels) -> Iterator[Removable]:
    """Look at the modules that `torch.save` is given; yield handles."""
    yield _saved.add(guarded)


def _make_save(patch: ProcessWidePatch, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        saved = [leaf for leaf in tree_leaves(obj) if isinstance(leaf, nn.Module)]
        if not saved or is_access_by_shoal():
            return original(obj, *args, **kwargs)
        modules = list(dict.fromkeys(inner for module in saved for inner in module.modules()))
        for guarded in patch.active:
            _check(guarded, modules)
        with _without_shoal(modules):
            return original(obj, *args, **kwargs)

    return save


def _check(guarded: GuardedModels, modules: Sequence[nn.Module]) -> None:
    """Raise UsageError if a module is a prepared one and this rank lacks a part of its values."""
    inside = {id(module) for module in modules}
    for prefix, model in guarded.models.items():
        for name, module in model.named_modules():
            if id(module) in inside:
                path = f"{prefix}{name}." if name else prefix
                check_owns_values(guarded, path, module, "torch.save(model)")


@contextmanager
def _without_shoal(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Take Shoal's hooks and forward functions off the modules while the context lasts."""
    with ExitStack() as stack:
        for module in modules:
            attributes = vars(module)
            for name, hooks in [*attributes.items()]:
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    own = type(hooks)((key, hook) for key, hook in hooks.items() if not _of(hook))
                    if len(own) < len(hooks):
                        stack.callback(attributes.__setitem__, name, hooks)
                        attributes[name] = own
            forward = attributes.get(_OWN_FORWARD)
            if forward is not None and _of(forward):
                stack.callback(attributes.__setitem__, _OWN_FORWARD, forward)
                del attributes[_OWN_FORWARD]
        yield


def _of(hook: Any) -> bool:
    """Return True if a hook, or a function that it wraps, is one of Shoal's."""
    hook = getattr(hook, "hook", hook)  # torch wraps those that are given the module
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a method
    code = getattr(hook, "__code__", None)  # tells more than the name of a function that wraps
    module = getattr(hook, "__module__", None) or type(hook).__module__
    is_in_package = code is not None and code.co_filename.startswith(_PACKAGE)
    return is_in_package or str(module).partition(".")[0] == __name__.partition(".")[0]


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
