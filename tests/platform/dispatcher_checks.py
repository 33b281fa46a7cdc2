"""Checks of private names about what watches or replaces torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _counts_modes(number_of_modes: Callable[[], int]) -> bool:
    found = [number_of_modes()]
    with _Watch():
        found.append(number_of_modes())
        with _Watch():
            found.append(number_of_modes())
    return [*found, number_of_modes()] == [0, 1, 2, 0]


def _knows_profilers(is_profiling: Callable[[], bool]) -> bool:
    found = [is_profiling()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        found.append(is_profiling())
    found.append(is_profiling())
    with torch.autograd.profiler.profile():
        found.append(is_profiling())
    return [*found, is_profiling()] == [False, True, False, True, False]


def _knows_fake_tensors(is_fake: Callable[[Any], bool]) -> bool:
    with FakeTensorMode():
        fake = torch.ones(2)
    return is_fake(fake) and not any(map(is_fake, (torch.ones(2), nn.Parameter(torch.ones(2)))))


def _registers_without_memory(weights_without_memory: Callable[[], Any]) -> bool:
    """A layer's weights have no memory, a tied one stays one, and conversions keep them."""
    with weights_without_memory():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        model = nn.Sequential(first, second).double()
    weights = [model[0].weight, model[1].weight]
    plain = nn.Linear(2, 2).weight
    return (
        weights[0] is weights[1]
        and weights[0].dtype is torch.float64
        and isinstance(weights[0], FakeTensor)
        and not isinstance(plain, FakeTensor)
    )


def _makes_tensors_without_memory(fake_tensors: Callable[[], Any]) -> bool:
    with fake_tensors():
        return bool(torch.ones(1 << 40).sum().shape == ())


def _is_raised_for_values(errors: tuple[type[Exception], ...]) -> bool:
    with FakeTensorMode():
        for ask in (lambda: torch.randn(1).item(), lambda: torch.randn(3).nonzero()):
            try:
                ask()
            except errors:
                continue
            return False
    return True


def _counts_kernels(kernel_flops: Callable[[], Any]) -> bool:
    counts = [*kernel_flops().values()]
    shape = (2, 4, 16, 8)
    product = 2 * 2 * 4 * 16 * 16 * 8
    forward, backward = counts[0](shape, shape, shape), counts[1](shape, shape, shape, shape)
    x, w, v = (5, 2, 16), (32, 16), (32, 8)  # time first; four gates of eight numbers
    layer = 2 * 5 * 2 * 32 * (16 + 8)
    both = counts[2](x, w, v), counts[3](x, w, v)
    return [forward, backward, *both] == [2 * product, 5 * product, layer, 2 * layer]


CHECKS: dict[str, Callable[[Any], bool]] = {
    "subclasses.number_of_modes": _counts_modes,
    "subclasses.is_profiling": _knows_profilers,
    "subclasses.is_fake": _knows_fake_tensors,
    "fake_tensors.VALUE_NEEDED": _is_raised_for_values,
    "fake_tensors.fake_tensors": _makes_tensors_without_memory,
    "fake_tensors.weights_without_memory": _registers_without_memory,
    "fake_tensors.kernel_flops": _counts_kernels,
}
