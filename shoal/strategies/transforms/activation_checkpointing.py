"""Recompute: keep a unit's inputs only, and compute the rest again in the backward pass.

      forward     in ─ [unit 1] ─ x1 ─ [unit 2] ─ x2 ─ [unit 3] ─ loss         kept: in, x1, x2
      backward                                      [again 3] ─ backward 3     one unit's activations at a time
                                     [again 2] ─ backward 2
                       [again 1] ─ backward 1

A third more computing for activations of one unit in place of all (Chen et al., 2016). The numbers
stay the same: random masks are drawn again from the same state, buffers are read as they were
found, and running statistics count each batch once. With a budget, the first step measures what
each unit keeps; from then on, the last units keep theirs as far as the budget reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.errors import StrategyRefused
from shoal.platform.tensors import MIB
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.subclasses import DeviceMode, function_modes, is_made_of_tensors
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.options import RecomputeOptions
from shoal.strategies.wrap_units import innermost, units


class Recompute(RecomputeOptions, Strategy):
    """Computes units of the model again in the backward pass."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces the forward functions of units, in place. Raises StrategyRefused where there
        is no unit.
        """
        # Without units inside: a unit's activations are all there at once when it is computed
        # again.
        chosen = [*innermost(_units(model, self.unit)).values()][:: self.every]
        if not chosen and not model.is_partial:  # some layers of the model may have none
            raise StrategyRefused(
                "recompute: the model has no Sequential, ModuleList or ModuleDict with blocks in "
                "it. Name the class of "
                "its blocks: recompute,unit=CLASS."
            )
        budget = _MemoryBudget(len(chosen), int(self.budget_mb * MIB)) if self.budget_mb else None
        for index, module in enumerate(chosen):
            module.forward = MethodType(
                _recomputed(module, index, budget), module
            )  # a copy's is bound to the copy
        return model


def _units(part: LocalModel, kind: str) -> dict[str, nn.Module]:
    """`units`, where a stage may have none of a class that others have. Collective in a
    pipeline.
    """
    if part.pipeline_axis is None or not kind:
        return units(part.module, kind)
    mine = any(type(module).__name__ == kind for module in part.module.modules())
    anybody = (
        part.pipeline_axis.all_reduce(torch.tensor(float(mine), device=part.pipeline_axis.device))
        > 0
    )
    return units(part.module, kind) if mine or not anybody else {}


def _recomputed(module: nn.Module, index: int, budget: _MemoryBudget | None) -> Callable[..., Any]:
    method = getattr(
        module.forward, "__func__", None
    )  # None for a function that somebody put in its place
    forward = method or (
        lambda _, *inputs, __forward=module.forward, **options: __forward(*inputs, **options)
    )
    # torch.compile takes no contexts, so they are there only where they are needed.
    has_buffers = any(True for _ in module.buffers())

    @wraps(module.forward)
    def run(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *inputs, **options)
        if budget is not None and (keeps := budget.context_for(index, self)) is not None:
            with keeps:
                return forward(self, *inputs, **options)
        modes = _torch_function_modes()
        aside: dict[str, Any] = (
            {"context_fn": lambda: _contexts(self, modes)} if has_buffers or modes else {}
        )
        return checkpoint(forward, self, *inputs, use_reentrant=False, **aside, **options)

    return run


def _torch_function_modes() -> list[TorchFunctionMode]:
    """What stands around functions of torch just now, and would not when they are computed again:
    dropout of slices, say, that is drawn for the whole. The device for new tensors is everywhere
    anyway."""
    found: list[TorchFunctionMode] = [] if torch.compiler.is_compiling() else function_modes()
    return [mode for mode in found if not isinstance(mode, DeviceMode)]


def _contexts(
    module: nn.Module, modes: list[TorchFunctionMode]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What one run of a unit stands in, and what stands around computing it again."""
    buffers = _BufferLog(module)
    return buffers.kept(), _Recomputation([buffers, *modes])


class _Recomputation:
    """Around computing a unit again, as often as that is done."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self.contexts, self.around = contexts, ExitStack()

    def __enter__(self) -> None:
        self.around = ExitStack()
        for context in self.contexts:
            self.around.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self.around.close()


class _BufferLog:
    """Running statistics and the like, which one run of a unit may read and change: it is computed
    again from what it found there, and what it, or another run, has left there stays."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: list[tuple[list[tuple[nn.Module, str]], Tensor]] = []
        self.left: list[tuple[nn.Module, str, Tensor | None]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around the run: copies of what it changes."""
        before = [(places, buffer, buffer.clone()) for buffer, places in self._places().items()]
        yield
        self.found = [
            (places, copy)
            for places, buffer, copy in before
            if _may_have_changed(places, buffer, copy)
        ]

    def __enter__(self) -> None:
        """Around computing it again: other tensors in the place of buffers, so that theirs are left
        alone.

        There may be several backward passes, or one in two halves, as in a zero-bubble pipeline.
        """
        self.left = [
            (owner, key, own_buffers(owner)[key])
            for places, _ in self.found
            for owner, key in places
        ]
        for places, copy in self.found:
            again = copy.clone()
            for owner, key in places:
                own_buffers(owner)[key] = again

    def __exit__(self, *_: object) -> None:
        for owner, key, buffer in self.left:
            own_buffers(owner)[key] = buffer
        self.left = []

    def _places(self) -> dict[Tensor, list[tuple[nn.Module, str]]]:
        """Every buffer with all places that hold it."""
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for owner in self.module.modules():
            for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                places.setdefault(buffer, []).append((owner, key))
        return places


def _may_have_changed(places: list[tuple[nn.Module, str]], buffer: Tensor, copy: Tensor) -> bool:
    """Whether one of `places` may hold something else than `copy`, which `buffer` was. BatchNorm's
    kernels count no version of what they write, so only values tell; a GPU is not waited for. Of a
    slice this rank's own, for DTensor would ask all ranks of the world, of which others have other
    buffers."""
    replaced = any(own_buffers(owner)[key] is not buffer for owner, key in places)
    return (
        replaced or buffer.device.type != "cpu" or not torch.equal(to_local(buffer), to_local(copy))
    )


class _MemoryBudget:
    """Which units keep their activations: none is known before each has run once."""

    def __init__(self, count: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.kept_bytes: list[int | None] = [None] * count
        self.keeps: list[bool] | None = None

    def context_for(self, index: int, module: nn.Module) -> AbstractContextManager[Any] | None:
        """What to run unit `index` in, if it is not to be recomputed; all units run in order."""
        if self.keeps is None and None not in self.kept_bytes:
            self.keeps = self._chosen()
        if self.keeps is not None:
            return nullcontext() if self.keeps[index] else None
        return self._measuring(index, module)

    def _chosen(self) -> list[bool]:
        """The last ones: their activations live for the shortest time."""
        keeps, left = [False] * len(self.kept_bytes), self.limit_bytes
        for index in reversed(range(len(keeps))):
            size = self.kept_bytes[index] or 0
            if size > left:
                break
            keeps[index], left = True, left - size
        return keeps

    @contextmanager
    def _measuring(self, index: int, module: nn.Module) -> Iterator[None]:
        """Counts what the unit keeps, each memory once, and holds it in CPU memory until it is
        needed.
        """
        parameters = {
            to_local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()
        }
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            for part in _inner_tensors(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in parameters:
                    seen[storage.data_ptr()] = storage.nbytes()
            # What is made of others, slices of a sequence say, stays where they are.
            return tensor.device, tensor if _is_tensor_wrapper(tensor) else tensor.detach().cpu()

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor if _is_tensor_wrapper(tensor) else tensor.to(device)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.kept_bytes[index] = sum(seen.values())


def _is_tensor_wrapper(tensor: Any) -> bool:
    return bool(is_made_of_tensors(tensor))


def _inner_tensors(tensor: Any) -> list[Tensor]:
    """What a tensor holds on this rank: itself, or what it is made of."""
    if not _is_tensor_wrapper(tensor):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
