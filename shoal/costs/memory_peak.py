"""The most bytes that a rank holds at once, by kind.

      forward of segment i     states + activations of 0 .. i-1 + what i needs meanwhile
      backward of segment i    states + activations of 0 .. i + gradients behind i + what i needs
      optimizer's step         states + all gradients + what the step needs

A pipeline holds the activations of all micro-batches that are in flight. Where its backward pass is
in two halves, the gradients of outputs wait between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from shoal.costs.step_cost import LocalSegment, StepCost


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on one rank at one moment.

    Attributes:
        activations: what autograd keeps, and what operations need for a moment.
        gathered: weights and messages that the strategy holds meanwhile, and the model's buffers.
        servers: a rank's share of what parameter servers on the hosts of ranks hold.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    servers: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))


class _Stage(NamedTuple):
    """Peaks of the passes through one stage, for one micro-batch.

    Attributes:
        kept: activations between its forward and its backward pass.
        forward: (activations, gathered) at the most of its forward pass, above what was there.
        backward: the same above the activations of others, with gradients of its weights that are
            there already.
        first_backward: (activations, gathered, gradients) where gradients appear one by one.
        for_weights: gradients of outputs, from a backward pass for inputs to that for weights.
        gradients: of the weights.
        at_once: of weights that a pass for weights alone differentiates together, as those of an
            MLP: the two largest.
    """

    kept: float
    forward: tuple[float, float]
    backward: tuple[float, float]
    first_backward: tuple[float, float, float]
    for_weights: float
    gradients: float
    at_once: float


def peak(step: StepCost) -> HeldBytes:
    """Return what the fullest rank of a step holds at its fullest moment."""
    return max((rank_peak(step, rank) for rank in range(len(step.rows))), key=lambda h: h.total)


def rank_peak(step: StepCost, rank: int) -> HeldBytes:
    """Return what one rank of the pipeline holds at its fullest moment."""
    held = step.parameters_of_rank(rank)
    parameters = sum(p.parameter_bytes for p in held)
    optimizer = sum(p.optimizer_bytes for p in held)
    all_gradients = sum(p.gradient_bytes for p in held)
    constant = step.always_held.get(rank, 0.0) + step.model.buffer_bytes
    constant += step.model.input_bytes.at(step.local_batch * step.accumulate)
    largest = max((p.parameter_bytes for p in held if p.gradient_bytes), default=0.0)
    moments = [
        (all_gradients, 0.0, step.after_held.get(rank, 0.0)),
        (all_gradients, step.model.optimizer_extra * largest, 0.0),
        *_moments(step, rank, all_gradients),
    ]
    gradients, activations, gathered = max(moments, key=sum)
    servers = step.server_bytes / step.layout.world
    return HeldBytes(parameters, gradients, optimizer, activations, constant + gathered, servers)


def _moments(step: StepCost, rank: int, all_gradients: float) -> Iterable[tuple[float, ...]]:
    """Yield (gradients, activations, gathered) at the fullest moment of each pass of a rank."""
    stages = {
        stage: _stage(step.segments_by_stage[stage], step.samples)
        for stage in step.passes.stages[rank]
    }
    alive = 0.0
    done: set[int] = set()
    gradients = all_gradients if step.gradients_stay else 0.0
    # The second local batch of a step is like the first, but for gradients that are there already.
    row = step.rows[rank] * min(step.accumulate, 2)
    for kind, number, _ in row:
        stage = stages[number]
        is_first = number not in done and not step.gradients_stay
        if kind == "F":
            yield gradients, alive + stage.forward[0], stage.forward[1]
            alive += stage.kept
        elif kind == "I":
            yield gradients, alive - stage.kept + stage.backward[0], stage.backward[1]
            alive += stage.for_weights
        else:
            others = alive - stage.kept
            if kind == "W":
                yield gradients + (stage.gradients if is_first else stage.at_once), alive, 0.0
                others -= stage.for_weights
            elif is_first:
                activations, gathered, new = stage.first_backward
                yield gradients + new, others + activations, gathered
            else:
                yield gradients, others + stage.backward[0], stage.backward[1]
            alive = others
            gradients += stage.gradients if is_first else 0.0
            done.add(number)


def _stage(segments: Sequence[LocalSegment], samples: int) -> _Stage:
    kept = 0.0
    forward = backward = (0.0, 0.0)
    alive_after: list[float] = []
    for segment in segments:
        moment = (kept + segment.forward_extra.at(samples), segment.held_forward)
        forward = max(forward, moment, key=sum)
        kept += segment.kept.at(samples)
        alive_after.append(kept)
        moment = (kept + segment.backward_extra.at(samples), segment.held_backward)
        left = kept - segment.kept.at(samples)
        backward = max(backward, moment, (left, segment.held_after), key=sum)
    first = (0.0, 0.0, 0.0)
    behind = 0.0
    for segment, alive in zip(reversed(segments), reversed(alive_after), strict=True):
        extra = segment.gradient_extra.at(samples)
        first = max(first, (alive + extra, segment.held_backward, behind), key=sum)
        left = alive - segment.kept.at(samples)
        first = max(first, (left, segment.held_after, behind), key=sum)
        behind += sum(p.gradient_bytes for p in segment.parameters)
    for_weights = sum(
        segment.work.output_bytes.at(samples) * segment.compute
        for segment in segments
        if any(p.gradient_bytes for p in segment.parameters)
    )
    at_once = sum(sorted(p.gradient_bytes for s in segments for p in s.parameters)[-2:])
    return _Stage(kept, forward, backward, first, for_weights, behind, at_once)
