"""Checks of private names about modules and their passes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shoal.optim.traits import ELEMENTWISE_OPTIMIZERS
from shoal.platform.torch_private.replaced_functions import replace_function


def _replace_call(replace_call: Any) -> bool:
    layer, seen = nn.Linear(1, 1), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    before = replace_call(layer, lambda text: text * 2)
    replaced = layer("ab") == "abab" and not seen
    replace_call(layer, before)
    return replaced and layer(torch.ones(1)).shape == (1,) and seen == [1]


def _own_parameters(own_parameters: Any) -> bool:
    layer = nn.Linear(2, 2, bias=False)
    found = own_parameters(layer)
    weight = found["weight"]
    found["weight"] = None
    return list(found) == ["weight", "bias"] and layer.weight is None and weight is not None


def _own_buffers(own_buffers: Any) -> bool:
    layer, other = nn.BatchNorm1d(2), torch.ones(2)
    own_buffers(layer)["running_mean"] = other
    return layer.running_mean is other


def _own_modules(own_modules: Any) -> bool:
    model, other = nn.Sequential(nn.ReLU()), nn.Tanh()
    own_modules(model)["0"] = other
    return model[0] is other


def _hooks_of(hooks_of: Any) -> bool:
    layer, forward, backward = nn.Linear(2, 2), lambda *_: None, lambda *_: None
    layer.register_forward_hook(forward)
    layer.register_full_backward_hook(backward)
    layer.register_forward_pre_hook(lambda *_: None)
    return hooks_of(layer, "forward", "backward") == [forward, backward] and all(
        _says_of(*expected)(lambda layer, kinds=kinds: hooks_of(layer, *kinds))
        for kinds, expected in (
            (["forward_pre"], ["input", "keywords"]),
            (["backward", "backward_pre"], ["backward", "before"]),
        )
    )


def _non_persistent_buffers(non_persistent_buffers: Any) -> bool:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    found = non_persistent_buffers(module) == {"dropped"}
    non_persistent_buffers(module).add("saved")
    return found and not module.state_dict()


def _hooked() -> dict[str, nn.Module]:
    kinds = ("none", "output", "input", "keywords", "backward", "before")
    found = {kind: nn.Linear(1, 1) for kind in kinds}
    found["output"].register_forward_hook(_hook)
    found["input"].register_forward_pre_hook(_hook)
    found["keywords"].register_forward_pre_hook(_hook, with_kwargs=True)
    found["backward"].register_full_backward_hook(_hook)
    found["before"].register_full_backward_pre_hook(_hook)
    return dict(found)


def _hook(*_: Any) -> None:
    """A hook that changes nothing."""


def _says_of(*expected: str) -> Callable[[Any], bool]:
    """A check that a function is true of modules with these hooks, and of no other."""
    return lambda asks: {kind for kind, layer in _hooked().items() if asks(layer)} == set(expected)


def _hooks(names: Any) -> bool:
    any_hooks = _says_of("output", "input", "keywords", "backward", "before")
    return any_hooks(lambda layer: any(getattr(layer, name) for name in names))


def _is_compiled(is_compiled: Any) -> bool:
    layer, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    with warnings.catch_warnings():  # torch's compiler imports what torch deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled.compile()
    return is_compiled(compiled) and not is_compiled(layer)


def _has_one_width(has_one_width: Any) -> bool:
    attentions = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3)
    return [has_one_width(attention) for attention in attentions] == [True, False]


def _is_called_by(act: Callable[[], Any], times: int) -> Callable[[Any], bool]:
    """Return a check that an act calls a function of some places so often, while it is replaced."""

    def check(places: Any) -> bool:
        calls = []

        def noting(original: Any) -> Any:
            def noted(*args: Any, **options: Any) -> Any:
                calls.append(args)
                return original(*args, **options)

            return noted

        put_back = replace_function(places, noting)
        act()
        put_back()
        while_replaced = len(calls)
        act()
        return len(calls) == while_replaced == times

    return check


def _call_functionally() -> None:
    model = nn.Linear(1, 1, bias=False)
    found = functional_call(model, {"weight": torch.zeros(1, 1)}, (torch.ones(1, 1),))
    assert found.item() == 0.0


def _pass_backward() -> None:
    x = torch.ones(1, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)


def _scale() -> None:
    x = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(x.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert x.item() == 0.5


def _clip(call: Callable[..., Any], *options: Any) -> Callable[[], Any]:
    def act() -> None:
        x = torch.ones(1, requires_grad=True)
        x.sum().backward()
        call([x], *options)

    return act


def _change_step_lists(change_step_lists: Any) -> bool:
    """Step other tensors than those of the optimizer, by each class that Shoal steps so."""
    for name in ELEMENTWISE_OPTIMIZERS:
        weight, other = nn.Parameter(torch.ones(2)), torch.ones(2)
        weight.grad = torch.ones(2)
        optimizer = getattr(torch.optim, name)([weight], lr=0.1)
        calls: list[int] = []
        change_step_lists(
            optimizer,
            lambda lists, other=other: lists[0].__setitem__(0, other),
            lambda calls=calls: calls.append(1),
        )
        optimizer.step()
        if not weight.eq(1).all() or other.eq(1).any() or len(calls) != 2:
            return False
    return True


CHECKS: dict[str, Callable[[Any], bool]] = {
    "optimizer_lists.change_step_lists": _change_step_lists,
    "module_state.BatchNormBase": lambda kind: (
        all(issubclass(layer, kind) for layer in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
        and not issubclass(nn.InstanceNorm1d, kind)
    ),
    "module_state.NormBase": lambda kind: (
        all(issubclass(layer, kind) for layer in (nn.BatchNorm1d, nn.InstanceNorm3d))
        and not issubclass(nn.LayerNorm, kind)
    ),
    "module_state.DropoutBase": lambda kind: all(
        issubclass(layer, kind) for layer in (nn.Dropout, nn.Dropout3d, nn.AlphaDropout)
    ),
    "module_state.HOOKS": _hooks,
    "module_state.HOOKS_OF_STATE": lambda names: set(names) <= vars(nn.Module()).keys(),
    "module_state.hooks_of": _hooks_of,
    "module_state.own_parameters": _own_parameters,
    "module_state.own_buffers": _own_buffers,
    "module_state.own_modules": _own_modules,
    "module_state.non_persistent_buffers": _non_persistent_buffers,
    "module_state.is_compiled": _is_compiled,
    "module_state.replace_call": _replace_call,
    "module_state.has_one_width": _has_one_width,
    "replaced_functions.TOTAL_NORM": _is_called_by(_clip(clip_grad_norm_, 1.0), 1),
    "replaced_functions.USES_LISTS": _is_called_by(_clip(clip_grad_value_, 1.0), 1),
    "replaced_functions.BACKWARD": _is_called_by(_pass_backward, 2),
    "replaced_functions.FUNCTIONAL_CALL": _is_called_by(_call_functionally, 1),
    "replaced_functions.UNSCALING": _is_called_by(_scale, 1),
    "replaced_functions.SAVE": _is_called_by(lambda: torch.save(1, io.BytesIO()), 1),
    "replaced_functions.replace_function": lambda _: True,  # the ones above call it
}
