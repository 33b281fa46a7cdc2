"""Activation checkpointing: keep only the inputs of units, and recompute them in the backward pass.

      forward     in ─ [unit 1] ─ x1 ─ [unit 2] ─ x2 ─ [unit 3] ─ loss      memory: in, x1, x2
      backward                                      [recompute 3] ─ backward 3
                                     [recompute 2] ─ backward 2             and the activations
                      [recompute 1] ─ backward 1                            of one unit at a time

It costs a third more computing, and needs the activations of one unit instead of all (Chen et al.,
2016). The numbers stay the same: recomputing draws random masks from the same generator state,
reads buffers as the forward pass found them, and does not update running statistics again.

Numbers of a unit as its forward pass found them, for when it is computed again.

      self.temperature *= 0.99      forward: 1.0 -> 0.99      recompute: 1.0 again, then 0.99 stays

A module may count its forward passes. Computed again in the backward pass, it would count twice and
compute other values than those that were differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from itertools import groupby
from types import MethodType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.costs.step_cost import LocalSegment, StepCost
from shoal.costs.work import NOTHING
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.subclasses import DeviceMode, function_modes
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult, Strategy
from shoal.strategies.options import RecomputeOptions
from shoal.strategies.wrap_units import innermost, units


class Recompute(RecomputeOptions, Strategy):
    """Recomputes units of the model in the backward pass."""

    can_apply_again: ClassVar[bool] = True
    takes_empty_weights: ClassVar[bool] = True

    def cost(self, step: StepCost) -> StepCost:
        """Return the cost of units that are computed again: they keep no more than their outputs.

        Raises: StrategyRefused: the model has no units.
        """
        found = step.once(("units", self.unit), lambda: [*innermost(units(step.module, self.unit))])
        names = found[:: self.every]
        if not names:
            raise StrategyRefused("recompute: the model has no Sequential or ModuleList of blocks.")
        segments: list[LocalSegment] = []
        for name, run in groupby(step.segments, lambda segment: _unit_of(segment, names)):
            group = [*run]
            segments += _segments_again(group) if name else group
        return replace(step, segments=tuple(segments))

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace the forward functions of units, in place.

        Raises: StrategyRefused: the model has no units.
        """
        # The innermost units: when a unit is recomputed, all of its activations are there at once.
        chosen = [*innermost(_wrap_units(model, self.unit)).values()][:: self.every]
        if not chosen and not model.is_partial:  # a pipeline stage may have none
            raise StrategyRefused(
                "recompute: the model has no Sequential, ModuleList or ModuleDict with blocks in "
                "it. Name the class of its blocks: recompute,unit=CLASS."
            )
        own_forwards = [vars(module).get("forward") for module in chosen]
        for module in chosen:
            # A method, so that a copy of the module gets one that is bound to the copy.
            module.forward = MethodType(_recomputed(module), module)

        def close() -> None:
            for module, own_forward in zip(chosen, own_forwards, strict=True):
                vars(module).pop("forward", None)
                if own_forward is not None:  # a function that the user had assigned
                    module.forward = own_forward
            model.outside_step.close()

        def run(forward: Forward, batch: LocalBatch) -> StepResult:
            try:
                return model.run(forward, batch)
            except CheckpointError as error:
                raise StrategyRefused(
                    "recompute: a block computes other tensors when it is computed again, as one "
                    "does that fills a cache of keys and values. Give the model use_cache=False, "
                    "or leave out recompute."
                ) from error

        return replace(
            model,
            run=run,
            pass_traits=replace(model.pass_traits, recomputes=True),
            outside_step=replace(model.outside_step, close=close),
        )


def _segments_again(run: list[LocalSegment]) -> list[LocalSegment]:
    """Return the segments of one unit, which keeps its output for the unit behind it.

    The forward pass runs without a graph, so it keeps nothing inside the unit. The output is not
    computed again: a checkpoint stops when it has found what the backward pass needs.
    """
    output = run[-1].work.output_bytes
    result = []
    again = NOTHING
    for index, segment in enumerate(run):
        is_last = index == len(run) - 1
        again = again + segment.kept
        if is_last:
            again = again + output.scaled(-1)
        result.append(
            segment._replace(
                again=segment.again + 1,
                kept=output if is_last else NOTHING,
                backward_extra=again + segment.backward_extra,
                gradient_extra=again + segment.gradient_extra,
            )
        )
    return result


def _unit_of(segment: LocalSegment, names: list[str]) -> str:
    path = segment.work.path
    return next((name for name in names if path == name or path.startswith(f"{name}.")), "")


def _wrap_units(model: LocalModel, class_name: str) -> dict[str, nn.Module]:
    """Return the units of this rank's layers. Collective in a pipeline.

    A stage may have no unit of the class if another stage has one.
    """
    axis = model.pipeline.axis
    if axis is None or not class_name:
        return units(model.module, class_name)
    has_class = any(type(module).__name__ == class_name for module in model.module.modules())
    stages_with_class = axis.all_reduce(torch.tensor(float(has_class), device=axis.device))
    if not has_class and stages_with_class > 0:
        return {}
    return units(model.module, class_name)  # raises if no stage has one


def _recomputed(module: nn.Module) -> Callable[..., Any]:
    """Return a forward method for `module` that checkpoints its present one."""
    # None for a plain function that was assigned to module.forward.
    method = getattr(module.forward, "__func__", None)
    forward = method or (
        lambda _, *inputs, __forward=module.forward, **options: __forward(*inputs, **options)
    )
    has_buffers = any(True for _ in module.buffers())
    numbers = RecomputedNumbers()

    @wraps(module.forward)
    def run(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *inputs, **options)
        modes = _torch_function_modes()
        extra: dict[str, Any] = {}
        if has_buffers or modes:  # else without contexts, which torch.compile does not take
            extra["context_fn"] = lambda: _contexts(self, modes)
        compute = forward if torch.compiler.is_compiling() else _explained(forward, numbers)
        return checkpoint(compute, self, *inputs, use_reentrant=False, **extra, **options)

    return run


def _explained(forward: Callable[..., Any], numbers: RecomputedNumbers) -> Callable[..., Any]:
    """Return a forward method that finds the same numbers when it runs for the second time, and
    whose error then names the cause.
    """
    before: Numbers | None = None

    def compute(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        nonlocal before
        if before is None:
            before = numbers.read(self)
            output = forward(self, *inputs, **options)
            numbers.learn(self, before)
            return output
        try:
            with numbers.as_before(self, before):
                return forward(self, *inputs, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise StrategyRefused(
                f"recompute: {type(self).__name__} fails when it is computed again ({error}): it "
                "has changed what it is given, such as a cache of keys and values. Give the model "
                "use_cache=False, or leave out recompute."
            ) from error

    return compute


def _torch_function_modes() -> list[TorchFunctionMode]:
    """Return the active torch function modes, which recomputing must enter again.

    Dropout of tensor parallel shards is such a mode. The mode of the default device is left out,
    because it is active in the backward pass anyway.
    """
    if torch.compiler.is_compiling():
        return []
    return [mode for mode in function_modes() if not isinstance(mode, DeviceMode)]


def _contexts(
    module: nn.Module, modes: list[TorchFunctionMode]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of one run of a unit: for its forward pass, and for recomputing it."""
    buffers = _RecomputeBuffers(module)
    return buffers.saved(), _RecomputeContext([buffers, *modes])


class _RecomputeContext:
    """Enters several contexts as one, any number of times: there may be many backward passes."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class BufferSlot(NamedTuple):
    """A name of a buffer in the module that owns it."""

    owner: nn.Module
    key: str


class _RecomputeBuffers:
    """Buffers as one forward pass of a unit found them, such as running statistics.

      forward       copy all buffers, run, keep the copies of changed ones
      recompute     enter: copies take the place of buffers      exit: buffers come back

    Recomputing thus reads the values of the forward pass, and changes no buffer a second time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: list[tuple[list[BufferSlot], Tensor]] = []
        self._replaced: list[tuple[BufferSlot, Tensor | None]] = []

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Save the buffers that the forward pass inside this context changes."""
        before = [(slots, buffer, buffer.clone()) for buffer, slots in self._slots().items()]
        yield
        self._copies = [
            (slots, copy)
            for slots, buffer, copy in before
            if _may_have_changed(slots, buffer, copy)
        ]

    def __enter__(self) -> None:
        """Put copies of the saved values in the place of buffers.

        New copies each time: there may be several backward passes, or one in two halves, as in a
        zero-bubble pipeline.
        """
        for slots, copy in self._copies:
            replacement = copy.clone()
            for slot in slots:
                buffers = own_buffers(slot.owner)
                self._replaced.append((slot, buffers[slot.key]))
                buffers[slot.key] = replacement

    def __exit__(self, *_: object) -> None:
        for slot, buffer in self._replaced:
            own_buffers(slot.owner)[slot.key] = buffer
        self._replaced = []

    def _slots(self) -> dict[Tensor, list[BufferSlot]]:
        """Map every buffer to all of its slots: a buffer may be shared."""
        slots: dict[Tensor, list[BufferSlot]] = {}
        for owner in self._module.modules():
            for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                slots.setdefault(buffer, []).append(BufferSlot(owner, key))
        return slots


def _may_have_changed(slots: Sequence[BufferSlot], buffer: Tensor, copy: Tensor) -> bool:
    """Return True if a slot may have another tensor than `buffer`, or other values than `copy`.

    BatchNorm's kernels do not count versions, so values are compared. Not on a GPU, where comparing
    would wait. A DTensor is compared by its shard: comparing DTensors is a collective of all ranks,
    and other ranks may have other buffers.
    """
    if any(own_buffers(slot.owner)[slot.key] is not buffer for slot in slots):
        return True
    return buffer.device.type != "cpu" or not torch.equal(to_local(buffer), to_local(copy))


Numbers = dict[tuple[int, str], int | float]
"""Values by the place of a module among those of the unit, and the attribute's name."""
LOOKS = 2
"""Forward passes after which numbers that have not changed are taken for constants."""


class RecomputedNumbers:
    """The numbers that the forward passes of one unit change."""

    def __init__(self) -> None:
        self._looks = LOOKS
        self._changing: set[tuple[int, str]] = set()

    def read(self, unit: nn.Module) -> Numbers:
        """Return the numbers that may change, as they are now."""
        if not self._looks and not self._changing:
            return {}
        tables = [vars(module) for module in unit.modules()]
        if not self._looks:
            return {(index, key): tables[index][key] for index, key in self._changing}
        return {
            (index, key): value
            for index, table in enumerate(tables)
            for key, value in table.items()
            if type(value) in (int, float)
        }

    def learn(self, unit: nn.Module, before: Numbers) -> None:
        """Note which numbers a forward pass has changed."""
        if self._looks:
            now = self.read(unit)
            self._changing |= {at for at, value in before.items() if now.get(at) != value}
            self._looks -= 1

    @contextmanager
    def as_before(self, unit: nn.Module, before: Numbers) -> Iterator[None]:
        """Put numbers back inside of this context to what they were before the forward pass."""
        if not self._changing:
            yield
            return
        tables = [vars(module) for module in unit.modules()]
        now = [(tables[index], key, tables[index][key]) for index, key in self._changing]
        for index, key in self._changing:
            tables[index][key] = before[index, key]
        try:
            yield
        finally:
            for table, key, value in now:
                table[key] = value
