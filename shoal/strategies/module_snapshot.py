"""Passes that leave no trace in the modules: the state of a model, saved before and put back after.

A module may count its forward passes, keep activations in a list, or write into its buffers. A
pass that the user did not ask for, to observe, to measure or to try, must not be seen in any of
these. Parameters keep their values: no such pass may change them.

Versions of buffers tell which ones a forward pass has changed in place, replaced, or added. Ranks
that change buffers by their own samples take the first rank's (`BufferSync`). Running statistics of
norms are left out, for training never reads them, unless who asks wants to know of those of
InstanceNorm too.

A trial makes such passes with few samples, so strategies measure nothing while one is running.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.norm import to_local
from shoal.data.seeds import preserve_rng_state
from shoal.platform.torch_private import DYNAMO
from shoal.platform.torch_private.module_state import NormBase, own_buffers
from shoal.platform.torch_private.tensor_state import version

CONTAINERS = (list, dict, set, deque)
"""Mutable containers whose contents are restored; only these types themselves and subclasses."""


@contextmanager
def restored_modules(module: nn.Module) -> Iterator[None]:
    """Restore all that a forward pass inside the block changes, and the random generators."""
    snapshots = [_ModuleSnapshot(each) for each in module.modules()]
    with preserve_rng_state(p.device for p in module.parameters()):
        try:
            yield
        finally:
            for snapshot in snapshots:
                snapshot.restore()


class ModelSnapshot:
    """Gradients, buffers and attributes of a model at the time of this call.

    The gradients are None from then on, until `restore`, so that those of the pass can be read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._snapshots = [_ModuleSnapshot(module, by_value=True) for module in model.modules()]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None

    def mutated(self) -> set[int]:
        """Return the ids of the buffers whose values or tensors have changed."""
        return {id(buffer) for each in self._snapshots for buffer in each.mutated_buffers()}

    def restore(self) -> None:
        """Put all tensors, values and attributes back."""
        for snapshot in self._snapshots:
            snapshot.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class _ModuleSnapshot:
    """The attributes of one module, its containers' contents, and the values of its tensors.

    Args: by_value: compare values, which also finds writes past autograd, by `tensor.data`. Tensors
        on meta and in a FakeTensorMode have none to compare.
    """

    def __init__(self, module: nn.Module, by_value: bool = False) -> None:
        self.module = module
        self.by_value = by_value
        self.buffers = dict(own_buffers(module))
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
            refill(container, contents)
        for tensor, values in self._changed_tensors():
            with torch.no_grad():
                tensor.copy_(values)

    def mutated_buffers(self) -> list[Tensor]:
        """Return the buffers whose values have changed, or in whose place another tensor stands."""
        changed = {id(tensor) for tensor, _ in self._changed_tensors()}
        current = own_buffers(self.module)
        return [
            buffer
            for name, buffer in self.buffers.items()
            if buffer is not None and (current.get(name) is not buffer or id(buffer) in changed)
        ]

    def _changed_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that have changed, and their values before.

        Of a DTensor the local shards are compared: torch.equal of DTensors is a collective of the
        whole world, and other stages of a pipeline have other tensors.
        """
        return [
            (tensor, values)
            for tensor, values, version_before in self.tensors
            if (
                not torch.equal(to_local(tensor), to_local(values))
                if self.by_value and not tensor.is_meta
                else version(tensor) != version_before
            )
        ]


def _values(contents: Any) -> list[Any]:
    return list(contents.values()) if isinstance(contents, dict) else list(contents)


def refill(container: Any, contents: Any) -> bool:
    """Give a container its former contents; return False if they are the same objects still."""
    before, now = _values(contents), _values(container)
    is_unchanged = len(before) == len(now) and all(
        one is other for one, other in zip(before, now, strict=True)
    )
    if is_unchanged and (not isinstance(contents, dict) or list(contents) == list(container)):
        return False
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(contents)
    else:
        container.extend(contents)
    return True


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which what the script has compiled runs as it is written.

    A pass with other functions in the place of some, or with other shapes, would be compiled anew.
    """
    if DYNAMO not in sys.modules:  # nothing was compiled yet
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


_depth = 0


@contextmanager
def trial_running() -> Iterator[None]:
    """Let `is_trial_running` be True inside of the block."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_trial_running() -> bool:
    """Return True inside of a trial."""
    return _depth > 0


BufferVersion = tuple[Tensor, int]
"""A buffer and its version at one moment. It keeps the tensor alive, for the id of a freed one may
become another tensor's.
"""


def mutable_buffers(module: nn.Module, norms: type[nn.Module] = NormBase) -> dict[str, Tensor]:
    """Return buffers by name, sorted by name. A buffer with two names is there twice.

    The order is the same on all ranks, which broadcast them one after the other.

    Args: norms: classes of layers whose buffers are left out.
    """
    buffers = {}
    for name, owner in module.named_modules():
        if isinstance(owner, norms):
            continue
        for key, buffer in owner.named_buffers(recurse=False):
            buffers[f"{name}.{key}"] = buffer
    return dict(sorted(buffers.items()))


def snapshot(module: nn.Module, norms: type[nn.Module] = NormBase) -> dict[str, BufferVersion]:
    """Return the versions of all buffers, to be given to `changed_since` later."""
    buffers = mutable_buffers(module, norms)
    return {name: (buffer, version(buffer)) for name, buffer in buffers.items()}


def changed_since(
    module: nn.Module,
    before: Mapping[str, BufferVersion],
    norms: type[nn.Module] = NormBase,
) -> dict[str, bool]:
    """Return by name if a buffer is another tensor, or has other values, than in `before`."""
    changes = {}
    for name, buffer in mutable_buffers(module, norms).items():
        known, known_version = before.get(name, (None, 0))
        changes[name] = known is not buffer or known_version != version(buffer)
    return changes


class BufferSync:
    """Broadcasts the first rank's buffers in each step, if the first step changed any.

    Each rank's forward pass changes buffers by its own samples. Without a broadcast, ranks would
    have different buffers.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._module = module
        self._axis = axis
        self._before: Mapping[str, BufferVersion] = snapshot(module)
        self._is_first_step = True
        self._broadcasts = False

    def broadcast(self) -> None:
        """Receive the first rank's buffers. Called at the beginning of a step. Collective."""
        if not self._broadcasts:
            return
        for buffer in mutable_buffers(self._module).values():
            self._axis.broadcast_tensor(buffer)

    def changed(self) -> bool:
        """Return True if this rank's first step has changed a buffer; False in later steps."""
        return self._is_first_step and any(changed_since(self._module, self._before).values())

    def record_change(self, on_any_rank: bool) -> None:
        """Record at the end of a step if `changed` was True on any rank.

        Only the first step counts: later steps are not compared, which would cost time.
        """
        if not self._is_first_step:
            return
        self._is_first_step = False
        self._broadcasts = on_any_rank
        self._before = {}
