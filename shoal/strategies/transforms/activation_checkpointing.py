"""Activation checkpointing: keep only the inputs of units, and recompute them in the backward pass.

      forward     in ─ [unit 1] ─ x1 ─ [unit 2] ─ x2 ─ [unit 3] ─ loss      memory: in, x1, x2
      backward                                      [recompute 3] ─ backward 3
                                     [recompute 2] ─ backward 2             and the activations
                      [recompute 1] ─ backward 1                            of one unit at a time

It costs a third more computing, and needs the activations of one unit instead of all (Chen et al.,
2016). The numbers stay the same: recomputing draws random masks from the same generator state,
reads buffers and numbers of modules as the forward pass found them, and changes none a second time:

      self.temperature *= 0.99      forward: 1.0 -> 0.99      recompute: 1.0 again, then 0.99 stays
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from itertools import groupby
from types import MethodType
from typing import Any, ClassVar

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
from shoal.strategies.full_model import enclosing
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
        for name, run in groupby(
            step.segments, lambda segment: enclosing(segment.work.path, names)
        ):
            group = [*run]
            segments += _segments_again(group) if name else group
        # torch's checkpoint enters a few contexts around each unit, in both passes.
        around = "recompute unit", len(names) / len(step.segments_by_stage)
        return replace(step, segments=tuple(segments), around_pass=(*step.around_pass, around))

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
    result = []
    again = NOTHING
    for index, segment in enumerate(run):
        kept = segment.work.output_bytes if index == len(run) - 1 else NOTHING
        again = again + segment.kept + kept.scaled(-1)
        result.append(
            segment._replace(
                again=segment.again + 1,
                kept=kept,
                backward_extra=again + segment.backward_extra,
                gradient_extra=again + segment.gradient_extra,
            )
        )
    return result


def _wrap_units(model: LocalModel, class_name: str) -> dict[str, nn.Module]:
    """Return the units of this rank's layers. Collective in a pipeline.

    A stage may have no unit of the class if another stage has one.
    """
    axis = model.pipeline.axis
    if axis is None or not class_name:
        return units(model.module, class_name)
    has_class = any(type(module).__name__ == class_name for module in model.module.modules())
    if axis.on_any_rank(has_class) and not has_class:
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

    @wraps(module.forward)
    def run(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *inputs, **options)
        is_compiling = torch.compiler.is_compiling()
        extra: dict[str, Any] = {}
        if has_buffers or not is_compiling:  # torch.compile takes no contexts
            # Recomputing enters them again: dropout of tensor parallel shards is such a mode. That
            # of the default device is active in the backward pass anyway.
            active = () if is_compiling else function_modes()
            modes = [mode for mode in active if not isinstance(mode, DeviceMode)]

            def contexts() -> Any:
                state = _UnitState(self, modes)
                return state.noted(), state  # for the forward pass, and for recomputing it

            extra["context_fn"] = contexts
        compute = forward if is_compiling else _explained(forward)
        return checkpoint(compute, self, *inputs, use_reentrant=False, **extra, **options)

    return run


def _explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward method whose error names the cause when it runs for the second time."""
    is_again = False

    def compute(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        nonlocal is_again
        was_run, is_again = is_again, True
        try:
            return forward(self, *inputs, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not was_run:
                raise
            raise StrategyRefused(
                f"recompute: {type(self).__name__} fails when it is computed again ({error}): it "
                "has changed what it is given, such as a cache of keys and values. Give the model "
                "use_cache=False, or leave out recompute."
            ) from error

    return compute


class _UnitState:
    """Buffers and numbers of one unit as its forward pass found them.

    forward       copy all, run, keep the copies of changed ones
    recompute     enter: copies take their places      exit: what was there comes back

    Args: modes: active in the forward pass; recomputing enters them again.
    """

    def __init__(self, unit: nn.Module, modes: Sequence[TorchFunctionMode]) -> None:
        self._unit = unit
        self._modes = modes
        self._entered = ExitStack()
        self._copies: list[tuple[dict[str, Any], str, Any]] = []
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the values that the forward pass inside this context changes."""
        copies: dict[int, Any] = {}  # a buffer may be shared
        before = []
        for table, key, value in self._values():
            if isinstance(value, Tensor) and id(value) not in copies:
                copies[id(value)] = value.clone()
            before.append((table, key, value, copies.get(id(value), value)))
        yield
        self._copies = [
            (table, key, copy)
            for table, key, value, copy in before
            if _may_have_changed(table.get(key), value, copy)
        ]

    def __enter__(self) -> None:
        """Put the noted values in their places.

        Buffers are copied each time: there may be several backward passes, or one in two halves, as
        in a zero-bubble pipeline.
        """
        clones = {id(copy): copy.clone() for _, _, copy in self._copies if isinstance(copy, Tensor)}
        for table, key, copy in self._copies:
            self._replaced.append((table, key, table[key]))
            table[key] = clones.get(id(copy), copy)
        for mode in self._modes:
            self._entered.enter_context(mode)

    def __exit__(self, *_: object) -> None:
        self._entered.close()
        for table, key, value in self._replaced:
            table[key] = value
        self._replaced = []

    def _values(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the buffers and numbers of all modules, with the tables that have them."""
        for module in self._unit.modules():
            numbers, buffers = vars(module), own_buffers(module)
            yield from ((numbers, k, v) for k, v in numbers.items() if type(v) in (int, float))
            yield from ((buffers, key, b) for key, b in buffers.items() if b is not None)


def _may_have_changed(now: Any, before: Any, copy: Any) -> bool:
    """Return True if there may be another value than `before`, or other values in its tensor.

    BatchNorm's kernels do not count versions, so values are compared. Not on a GPU, where comparing
    would wait. A DTensor is compared by its shard: comparing DTensors is a collective of all ranks,
    and other ranks may have other buffers.
    """
    if not isinstance(before, Tensor):
        return bool(now != before)
    if now is not before or before.device.type != "cpu":
        return True
    return not torch.equal(to_local(before), to_local(copy))
