"""Cost of ZeRO through torch's `fully_shard`.

      between steps      shards of parameters, gradients and optimizer states, rounded up by rows
      gathering a unit   its whole weights, and the message from which they are copied
      reducing a unit    its whole gradients, and the message into which they are copied

On the CPU a rank waits for every gathering and every reduction. zero1 and zero2 gather each unit
once; zero3 frees it after its forward pass and gathers it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from math import ceil

from shoal.costs.step_cost import HeldParameter, SentMessage, StepCost, total
from shoal.strategies.full_model import enclosing
from shoal.strategies.options import ZeroOptions
from shoal.strategies.wrap_units import innermost, units


def cost(options: ZeroOptions, stage: int, step: StepCost) -> StepCost:
    """Return a step with sharded states.

    Args: stage: 1, 2 or 3.
    """
    ranks = options.hybrid or step.layout.data
    step = replace(step, shard_ranks=options.hybrid)
    if step.layout.data == 1:
        return step
    shapes = {p.name: p.shape for p in step.model.parameters}

    def shard(parameter: HeldParameter, all_kinds: bool) -> HeldParameter:
        shape = shapes[parameter.name]
        rows = shape[0] if shape else 1
        share = ceil(rows / ranks) / rows if shape else 1.0
        sharded = parameter._replace(optimizer_bytes=parameter.optimizer_bytes * share)
        if not all_kinds:
            return sharded
        return sharded._replace(
            parameter_bytes=parameter.parameter_bytes * share,
            gradient_bytes=parameter.gradient_bytes * share,
        )

    if len(step.rows) > 1:
        return _after_pipeline(step.map_parameters(lambda p: shard(p, False)), ranks)
    whole = [float(sum(p.nbytes for p in s.parameters if p.gradient_bytes)) for s in step.segments]
    step = step.map_parameters(lambda p: shard(p, True))
    step = _with_units(options, stage, step, whole)
    return replace(step, optimizer_share=step.optimizer_share / ranks)


def _after_pipeline(step: StepCost, ranks: int) -> StepCost:
    """Shard optimizer states only; gradients of all micro-batches are whole (`PipelineZeroOne`)."""
    sizes = {rank: total(step.parameters_of_rank(rank)) for rank in range(len(step.rows))}
    return replace(
        step,
        after_passes={r: (SentMessage("reduce_scatter", s, "shard"),) for r, s in sizes.items()},
        after_step={r: (SentMessage("all_gather", s, "shard"),) for r, s in sizes.items()},
        after_held={r: 2 * s for r, s in sizes.items()},  # what is sent, and what is received
        optimizer_share=step.optimizer_share / ranks,
    )


def _with_units(options: ZeroOptions, stage: int, step: StepCost, whole: list[float]) -> StepCost:
    """Add gatherings and reductions to the first and last segments of each unit.

    Args: whole: bytes of the whole trained parameters of each segment.
    """

    def unit_of_each_segment() -> list[str]:
        names = [*innermost(units(step.module, options.unit))]
        return [enclosing(segment.work.path, names) or "" for segment in step.segments]

    unit_of = step.once(("unit of each segment", options.unit), unit_of_each_segment)
    scale = 0.5 if options.gather else 1.0  # bfloat16 in place of float32
    held = _HeldUnits(unit_of, whole, stage == 3, scale)
    # zero1 keeps whole gradients until the last micro-batch, in place of shards.
    kept = sum(whole) - sum(p.gradient_bytes for s in step.segments for p in s.parameters)
    kept *= stage == 1 and step.accumulate > 1
    # zero1 and zero2 gather in the first micro-batch of a step, and zero1 reduces in the last.
    gathered, reduced = (1 / step.accumulate if stage < least else 1.0 for least in (3, 2))
    tensors: Counter[str] = Counter()
    for segment, name in zip(step.segments, unit_of, strict=True):
        tensors[name] += sum(p.gradient_bytes > 0 for p in segment.parameters)
    gathers: dict[str, SentMessage] = {}
    reductions: dict[str, tuple[SentMessage, ...]] = {}
    for name, size in held.sizes.items():
        around = (("fsdp message", 1), ("fsdp tensor", tensors[name]))
        # Weights are copied out of what was gathered, and gradients into what is reduced.
        gathers[name] = SentMessage("all_gather", scale * size, "shard", gathered, around, passes=2)
        reductions[name] = (
            SentMessage("reduce_scatter", size, "shard", reduced, around, passes=2),
            SentMessage("all_reduce", size, "replicate", reduced),
        )
    segments = []
    for index, (segment, name) in enumerate(zip(step.segments, unit_of, strict=True)):
        begun = [name] if name and index == held.first[name] else []
        if index == 0 and held.sizes[""]:  # the root: gathered before all units, reduced after them
            begun.insert(0, "")
        again = [name] if stage == 3 and name and index == held.last[name] else []
        segments.append(
            segment._replace(
                held_forward=segment.held_forward + held.forward(index),
                held_backward=segment.held_backward + held.backward(index) + kept,
                held_after=segment.held_after + held.after(index),
                before_forward=(*(gathers[each] for each in begun), *segment.before_forward),
                before_backward=(*(gathers[each] for each in again), *segment.before_backward),
                after_backward=(
                    *segment.after_backward,
                    *(message for each in reversed(begun) for message in reductions[each]),
                ),
            )
        )
    return replace(step, segments=tuple(segments))


class _HeldUnits:
    """Bytes that the engine holds beside shards while each segment computes.

    Attributes:
        unit_of: the unit of each segment; "" for the root, which holds what is in no unit.
        sizes: bytes of each unit's whole weights.
        scale: bytes of gathered weights, as a multiple of those of the shards.
        first, last: indices of the segments of each unit.
        _so_far: bytes of a segment's unit up to this segment.
        _begun: units that have begun, at each segment. _sizes_up_to: bytes of so many units.
    """

    def __init__(self, unit_of: list[str], whole: list[float], frees: bool, scale: float) -> None:
        self.unit_of = unit_of
        self.scale = scale
        self.frees = frees
        self.order = [*dict.fromkeys(name for name in unit_of if name)]
        self.sizes = dict.fromkeys([*self.order, ""], 0.0)
        self.last: dict[str, int] = {}
        self._so_far: list[float] = []
        for index, (size, name) in enumerate(zip(whole, unit_of, strict=True)):
            self.sizes[name] += size
            self.last[name] = index
            self._so_far.append(self.sizes[name])
        self.first = {name: index for index, name in reversed([*enumerate(unit_of)])}
        starts = [self.first[name] for name in self.order]
        self._begun = [bisect_right(starts, index) for index in range(len(unit_of))]
        sizes = [self.sizes[name] for name in self.order]
        self._sizes_up_to = [0.0, *accumulate(sizes)]

    def forward(self, index: int) -> float:
        """Return gathered weights, and the message of the last gathering, which stays so long: at
        the beginning of a unit also that of the gathering before.
        """
        begun = self._begun[index]
        begins = begun > 1 and index == self.first[self.order[begun - 1]]
        before = self.scale * self.sizes[self.order[begun - 2]] if begins else 0.0
        return self._weights(index) + self._last_message(index) + before

    def backward(self, index: int) -> float:
        """Return gathered weights, the copy from which the unit behind was reduced, and gradients
        of this unit that are there already.
        """
        behind = self.order[self._begun[index] : self._begun[index] + 1]
        # The message of the last gathering goes when the backward pass begins.
        last = self._last_message(index) if self.frees else 0.0
        reduced_from = self.sizes[behind[0]] if behind else last
        gradients = self.sizes[self.unit_of[index]] - self._so_far[index]
        return self._weights(index) + reduced_from + gradients

    def after(self, index: int) -> float:
        """Return the weights; at the end of a unit its gradients and their copy in place of its own
        weights, which are freed before.
        """
        name = self.unit_of[index]
        ends_unit = bool(name) and index == self.first[name]
        return self._weights(index) + (2 - self.scale) * self.sizes[name] * ends_unit

    def _weights(self, index: int) -> float:
        name = self.unit_of[index]
        if self.frees:
            return self.scale * (self.sizes[""] + (self.sizes[name] if name else 0.0))
        return self.scale * (self.sizes[""] + self._sizes_up_to[self._begun[index]])

    def _last_message(self, index: int) -> float:
        begun = self._begun[index]
        return self.scale * self.sizes[self.order[begun - 1]] if begun else 0.0
