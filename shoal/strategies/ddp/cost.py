"""Cost of ddp: all gradients of every rank are averaged, in one of two layouts.

torch's engine   buckets for the whole run          sent while the backward pass goes on
own buckets      gradients + messages as large      sent beside it; after it for a small model, and
                                                    in a pipeline

Gradients are copied into a message and looked at; own buckets are copied back to them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.costs.step_cost import HeldParameter, LocalSegment, SentMessage, StepCost, total
from shoal.errors import StrategyRefused
from shoal.platform.tensors import MIB
from shoal.strategies.options import DdpOptions

FIRST_BUCKET_BYTES = 1 * MIB
"""Size at which torch's engine closes its first bucket (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""

PASSES_OF_ENGINE, PASSES_OF_OWN = 3, 5
"""Times that gradients are read or written: a copy is two of them, the look for NaN one."""

SMALL_MIB = 4.0
"""Gradients of a small model. Up to this size on the CPU, messages after the backward pass take
less time than the hooks and buckets of DistributedDataParallel.
"""


def cost(options: DdpOptions, step: StepCost) -> StepCost:
    """Return a step with averaged gradients.

    Raises: StrategyRefused: gradients are compressed, which has no cost model yet.
    """
    if options.compress != "none":
        raise StrategyRefused(f"compress={options.compress}: its cost in time is not modelled.")
    if step.layout.data == 1:
        return step
    bound = (options.bucket_mb * MIB,)
    is_divided = len(step.rows) > 1 or step.layout.tensor > 1
    # Gradients that are sent after the backward pass, as `ddp.strategy` says.
    fits = total(step.parameters_of_rank(0)) <= min(options.bucket_mb, SMALL_MIB) * MIB
    is_small = not is_divided and fits and step.device == "cpu" and options.allreduce == "backend"
    if not is_divided and not is_small:  # torch's engine
        limits = (FIRST_BUCKET_BYTES, *bound)
        # Micro-batches before the last accumulate gradients of their own beside the buckets.
        apart = total(step.parameters_of_rank(0)) if step.accumulate > 1 else 0.0
        step = replace(step, gradients_stay=True, always_held={0: apart})
        return _with_buckets(step, limits, messages_are_copies=False)
    if len(step.rows) == 1 and not is_small:
        return _with_buckets(step, bound, messages_are_copies=True)
    messages = {
        rank: tuple(
            SentMessage("all_reduce", size, passes=PASSES_OF_OWN)
            for size, _ in _buckets(step.segments_of_rank(rank), bound)
        )
        for rank in range(len(step.rows))
    }
    copies = {rank: sum(m.size_bytes for m in sent) for rank, sent in messages.items()}
    return replace(step, after_passes=messages, after_held=copies)


def _with_buckets(step: StepCost, limits: Sequence[float], messages_are_copies: bool) -> StepCost:
    segments = list(step.segments)
    passes = PASSES_OF_OWN if messages_are_copies else PASSES_OF_ENGINE
    sent = 0.0
    sizes = {last: size for size, last in _buckets(segments, limits)}
    for index in range(len(segments) - 1, -1, -1):
        segment = segments[index]
        message = SentMessage("all_reduce", sizes.get(index, 0.0), passes=passes)
        beside = (message,) if index in sizes else ()
        sent += sizes.get(index, 0.0)
        held = segment.held_backward + (sent if messages_are_copies else 0.0)
        segments[index] = segment._replace(beside=beside, held_backward=held)
    after = {0: sent} if messages_are_copies else {}
    return replace(step, segments=tuple(segments), after_held=after)


def _buckets(
    segments: Sequence[LocalSegment], limits: Sequence[float]
) -> Iterable[tuple[float, int]]:
    """Yield the size of each bucket, and the index of the segment that completes it.

    Buckets are filled in the order of the backward pass. One is closed when it has reached its
    limit, as in torch's `compute_bucket_assignment_by_size`.
    """
    filled, count = 0.0, 0
    last = len(segments) - 1
    for index in range(len(segments) - 1, -1, -1):
        for parameter in reversed(segments[index].parameters):
            filled += _sent(parameter)
            last = index
            if filled >= limits[min(count, len(limits) - 1)]:
                yield filled, last
                filled, count = 0.0, count + 1
    if filled:
        yield filled, last


def _sent(parameter: HeldParameter) -> float:
    return parameter.nbytes if parameter.gradient_bytes else 0.0
