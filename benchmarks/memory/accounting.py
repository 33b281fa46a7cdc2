"""Counts the bytes of tensors that are alive: what a process holds, not what its allocator keeps.

Every operation's results are noticed by their storage, and forgotten when it dies. Storages that a
strategy empties for a while, as `fully_shard` does with gathered parameters, count for what they
hold at that moment. Tensors that are made of others, shards and 8-bit moments, count for what these
hold, and so do the operations inside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Inside, counts what is in `parameters`, their gradients, `state` and what is made since, on
    one device.

    Args:
        parameters, state: what the optimizer of this rank owns, wherever that lies.
        device: of the model; other devices' tensors are left out.

    Attributes: peak_bytes: the most that was held at once. beside_bytes: the most that was held at
        once of all that is neither owned nor memory of gradients.
    """

    def __init__(self, parameters: list[Tensor], state: list[Tensor], device: torch.device) -> None:
        super().__init__()
        self.parameters, self.device = parameters, device
        self.storages: WeakSet[UntypedStorage] = WeakSet()
        self.states: WeakSet[UntypedStorage] = WeakSet()
        self.peak_bytes = self.beside_bytes = 0
        for tensor in [*parameters, *state, *self._gradients()]:
            self._notice(tensor)
            self.states.update(_storages(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operations that it does on its parts come here next
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._notice(result)
        self._count()
        return results

    def _notice(self, tensor: Tensor) -> None:
        self.storages.update(
            storage for storage in _storages(tensor) if storage.device.type == self.device.type
        )

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _count(self) -> None:
        for gradient in self._gradients():
            self.states.update(_storages(gradient))
        states, alive = set(self.states), list(self.storages)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in alive))
        beside = sum(storage.nbytes() for storage in alive if storage not in states)
        self.beside_bytes = max(self.beside_bytes, beside)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind `tensors` on this rank, each memory once."""
    return sum(
        storage.nbytes()
        for storage in {storage for tensor in tensors for storage in _storages(tensor)}
    )


def _storages(tensor: Any) -> Iterator[UntypedStorage]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):
            yield from _storages(part)
