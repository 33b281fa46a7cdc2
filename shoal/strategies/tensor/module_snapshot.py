"""Run a forward pass that leaves no trace in the modules, for plans and comparisons.

A module may count its forward passes, keep activations in a list, or write into its buffers. A
pass that the user did not ask for must not be seen in any of these.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.tensor_state import version

CONTAINERS = (list, dict, set, deque)
"""Mutable containers whose contents are restored; only these types themselves and subclasses."""


@contextmanager
def restored_modules(module: nn.Module) -> Iterator[None]:
    """Restore all that a forward pass inside the block changes in `module` and its modules.

    Restored are attributes, the contents of containers among them, the values of buffers and of
    other tensors that are attributes, and the state of the random generators. Parameters keep
    their values, since no forward pass may change them.
    """
    snapshots = [_ModuleSnapshot(each) for each in module.modules()]
    random_state = random.getstate()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            random.setstate(random_state)
            for snapshot in snapshots:
                snapshot.restore()


class _ModuleSnapshot:
    """The attributes of one module, its containers' contents, and the values of its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.containers = [
            (value, value.copy())
            for value in self.attributes.values()
            if isinstance(value, CONTAINERS)
        ]
        nested = [leaf for _, contents in self.containers for leaf in _values(contents)]
        tensors = [
            value
            for value in (*self.attributes.values(), *nested)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        ]
        self.tensors = [
            (tensor, tensor.detach().clone(), version(tensor))
            for tensor in tensors
            if not tensor.is_inference() and tensor.layout is torch.strided
        ]

    def restore(self) -> None:
        current = vars(self.module)
        if any(current.get(key, current) is not value for key, value in self.attributes.items()):
            current.update(self.attributes)
        for key in [key for key in current if key not in self.attributes]:
            del current[key]
        for container, contents in self.containers:
            _refill(container, contents)
        for tensor, values, version_before in self.tensors:
            if version(tensor) != version_before:
                with torch.no_grad():
                    tensor.copy_(values)


def _values(contents: Any) -> list[Any]:
    return list(contents.values()) if isinstance(contents, dict) else list(contents)


def _refill(container: Any, contents: Any) -> None:
    """Give a container its former contents, if they are not the same objects still."""
    before, now = _values(contents), _values(container)
    is_unchanged = len(before) == len(now) and all(
        one is other for one, other in zip(before, now, strict=True)
    )
    if is_unchanged and (not isinstance(contents, dict) or list(contents) == list(container)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(contents)
    else:
        container.extend(contents)
