"""Checks of private names about subclasses of tensors and what stands around functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensor_checks import asked
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from shoal.testing import world


def _dispatch_mode(mode: Any) -> bool:
    class Random(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(torch.Tag.nondeterministic_seeded in func.tags)
            return func(*args, **(kwargs or {}))

    seen: list[bool] = []
    with Random():
        torch.zeros(2).bernoulli_(0.5)
    return seen[-1] and not seen[0]


def _disables_modes(disable: Any) -> bool:
    class Counting(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Counting():
        with disable():
            torch.zeros(2)
        hidden = not seen
        torch.zeros(2)
    return hidden and bool(seen)


def _hides_from_modes(disable: Any) -> bool:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Watching(), disable():
        tensor.clone()
    return seen == []


def _disables(disable: Any) -> bool:
    with disable():
        try:
            asked(lambda tensor: tensor.shape)
        except IndexError:  # nobody was asked
            return True
    return False


def _made(make_wrapper_subclass: Any) -> bool:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError

    made = make_wrapper_subclass(Wrapper, (3, 10**12), dtype=torch.float64)
    return type(made) is Wrapper and made.shape == (3, 10**12) and made.dtype == torch.float64


def _function_modes(function_modes: Any) -> bool:
    with (mode := TorchFunctionMode()):
        return any(found is mode for found in function_modes())


def _device_mode(kind: Any) -> bool:
    from shoal.platform.torch_private.subclasses import function_modes

    with torch.device("cpu"):
        return any(isinstance(mode, kind) for mode in function_modes())


def _asks_of_a_dtensor() -> bool:
    from shoal.platform.torch_private.subclasses import is_made_of_tensors

    return is_made_of_tensors(distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,))))


def _is_made_of_tensors(is_made_of_tensors: Any) -> bool:
    plain = nn.Parameter(torch.zeros(1))
    return not is_made_of_tensors(plain) and world.run(1, _asks_of_a_dtensor) == [True]


def _lets_functions_alone(disabled: Any) -> bool:
    class Named(Tensor):
        __torch_function__ = disabled

    named = torch.ones(2).as_subclass(Named)
    return type(named) is Named and type(named + named) is Tensor


def _pops_a_mode(pop_mode_temporarily: Any) -> bool:
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Seeing():
        with pop_mode_temporarily():
            torch.ones(2).exp()
        inside = len(seen)
        torch.ones(2).exp()
    return inside == 0 and len(seen) > 0


class _Seeing(_python_dispatch.TorchDispatchMode):
    """Counts the operators that it sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _has_dispatch_modes(has_modes: Any) -> bool:
    before = has_modes()
    with _Seeing():
        return has_modes() and not before


def _push_dispatch_mode(push: Any) -> bool:
    mode = _Seeing()
    push(mode)
    torch.zeros(2)
    _python_dispatch._pop_mode()
    torch.zeros(2)
    return mode.count == 1


def _remove_dispatch_mode(remove: Any) -> bool:
    below, above = _Seeing(), _Seeing()
    _python_dispatch._push_mode(below)
    with above:
        remove(below)
        torch.zeros(2)
    torch.zeros(2)
    return (below.count, above.count) == (0, 1)


CHECKS: dict[str, Callable[[Any], bool]] = {
    "subclasses.DispatchMode": _dispatch_mode,
    "subclasses.has_dispatch_modes": _has_dispatch_modes,
    "subclasses.push_dispatch_mode": _push_dispatch_mode,
    "subclasses.remove_dispatch_mode": _remove_dispatch_mode,
    "subclasses.disable_dispatch_modes": _disables_modes,
    "subclasses.make_wrapper_subclass": _made,
    "subclasses.DisableTorchFunctionSubclass": _disables,
    "subclasses.DisableTorchFunction": _hides_from_modes,
    "subclasses.DISABLED_TORCH_FUNCTION": _lets_functions_alone,
    "subclasses.pop_mode_temporarily": _pops_a_mode,
    "subclasses.function_modes": _function_modes,
    "subclasses.DeviceMode": _device_mode,
    "subclasses.is_made_of_tensors": _is_made_of_tensors,
}
