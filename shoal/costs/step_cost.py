"""The description of a step, which strategies transform: what ranks hold, compute and send.

      StepCost of one rank ──> Pipeline.cost ──> TensorParallel.cost ──> Zero3.cost ──> StepCost
      holds everything         stages            shares of segments      shards, gatherings

Ranks along the data and the tensor axis do the same, so one of them stands for all. Ranks along
the pipeline axis hold different stages: `passes` has the actions of each. So 16,384 ranks cost no
more than one pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from shoal.costs.pass_table import ONE_RANK, Action, PassTable
from shoal.costs.work import NOTHING, Affine, ModelWork, SegmentWork
from shoal.errors import ShoalError

Overheads = tuple[tuple[str, float], ...]
"""(name of `Compute.overheads`, how often), ...: what engines in Python do beside operations."""


class SentMessage(NamedTuple):
    """A message in which a rank takes part.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, broadcast, send, push or pull.
        size_bytes: of the whole tensor: of all ranks' shards together, for gathers and scatters.
        axis: whose ranks take part: data, shard, replicate, tensor, pipeline or servers.
        share: share of the steps in which it is sent.
        around: what an engine does around it, as in `StepCost.around_pass`.
        passes: how often this rank reads or writes its bytes in memory beside the message: a copy
            into it reads them once and writes them once.
    """

    kind: str
    size_bytes: float
    axis: str = "data"
    share: float = 1.0
    around: Overheads = ()
    passes: int = 0


class HeldParameter(NamedTuple):
    """A parameter, as this rank holds it between steps.

    Attributes: numel, nbytes: of the whole parameter, or of this rank's slice of it, before it is
        sharded.
    """

    name: str
    numel: float
    nbytes: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float


class LocalSegment(NamedTuple):
    """A segment of the forward pass on one rank.

    Attributes:
        stage: of the pipeline.
        compute: share of the operations that this rank computes.
        again: forward passes that the backward pass repeats.
        kept, forward_extra, backward_extra, gradient_extra: as in `SegmentWork`, of this rank.
        held_forward, held_backward: bytes that the strategy holds while the segment computes:
            gathered weights, messages, gradients on their way.
        held_after: the same at the end of its backward pass, when its activations are freed.
        before_forward ... after_backward: messages for which the rank waits.
        prefetched: messages that begin with the step, one after the other; the forward pass waits.
        beside: messages that are sent while earlier segments compute, in the last micro-batch.
    """

    work: SegmentWork
    parameters: tuple[HeldParameter, ...]
    kept: Affine
    forward_extra: Affine
    backward_extra: Affine
    gradient_extra: Affine
    stage: int = 0
    compute: float = 1.0
    again: float = 0.0
    held_forward: float = 0.0
    held_backward: float = 0.0
    held_after: float = 0.0
    before_forward: tuple[SentMessage, ...] = ()
    after_forward: tuple[SentMessage, ...] = ()
    before_backward: tuple[SentMessage, ...] = ()
    after_backward: tuple[SentMessage, ...] = ()
    prefetched: tuple[SentMessage, ...] = ()
    beside: tuple[SentMessage, ...] = ()


class RankLayout(NamedTuple):
    """Sizes of the axes of ranks, tensor innermost and pipeline outermost."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    hosts: int = 1

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline)


SegmentTime = Callable[[SegmentWork, float], tuple[float, float]]
"""(segment, samples) -> seconds of its forward and of its backward pass."""


@dataclass(frozen=True)
class StepCost:
    """A step of all ranks of one pipeline, which may be a single rank.

    Attributes:
        module: the model; its tensors may have no memory. For strategies that look at it.
        passes: of all ranks of the pipeline, for one local batch.
        microbatches: of the pipeline.
        accumulate: local batches of a step.
        is_loop_loss: the loop computes the loss, for `run.backward`.
        around_pass: what an engine does around each pass through a stage.
        gradients_stay: gradients have memory for the whole run, such as buckets.
        always_held: further bytes for the whole run, by rank of the pipeline.
        after_passes: messages of each rank of the pipeline between its passes and its step.
        after_step: messages of each rank after its optimizer's step.
        optimizer_share: share of the model's numbers that the fullest rank steps.
        shard_ranks: ranks that shard together, if these are not all of the data axis; else 0.
        servers: parameter servers.
        server_bytes: that all servers hold together, beside the ranks on their hosts.
        after_held: further bytes of each rank between its passes and its step.
        is_exact: the numbers are those of one device.
        band: share by which nine of ten predicted times of this kind were off at most, on an idle
            machine with a core for each rank: benchmarks/plan.
        segment_time: predicts times, for strategies that balance them.
        device: of the ranks: cpu or cuda.
        known: results of `once`, shared by all steps of one model.
    """

    model: ModelWork
    module: Any
    layout: RankLayout
    global_batch: int
    segments: tuple[LocalSegment, ...]
    segment_time: SegmentTime
    passes: PassTable = ONE_RANK
    microbatches: int = 1
    accumulate: int = 1
    is_loop_loss: bool = False
    around_pass: Overheads = ()
    gradients_stay: bool = False
    always_held: Mapping[int, float] = field(default_factory=dict)
    after_passes: Mapping[int, tuple[SentMessage, ...]] = field(default_factory=dict)
    after_step: Mapping[int, tuple[SentMessage, ...]] = field(default_factory=dict)
    optimizer_share: float = 1.0
    shard_ranks: int = 0
    servers: int = 0
    server_bytes: float = 0.0
    after_held: Mapping[int, float] = field(default_factory=dict)
    is_exact: bool = True
    band: float = 0.36
    device: str = "cpu"
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """Return what `find` returns, or raise what it raises: it runs once for a model and a key.

        For what strategies find by looking at the model, which takes them seconds.
        """
        if key not in self.known:
            try:
                self.known[key] = find()
            except ShoalError as error:
                self.known[key] = error
        if isinstance(self.known[key], ShoalError):
            raise self.known[key]
        return self.known[key]

    @property
    def local_batch(self) -> int:
        """Samples of the fullest rank in one local batch."""
        return ceil(ceil(self.global_batch / self.layout.data) / self.accumulate)

    @property
    def samples(self) -> int:
        """Samples of one pass: a micro-batch of the fullest rank."""
        return ceil(self.local_batch / self.microbatches)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of each rank of the pipeline, for one local batch."""
        return self.passes.rows

    @cached_property
    def segments_by_stage(self) -> Mapping[int, list[LocalSegment]]:
        by_stage: dict[int, list[LocalSegment]] = defaultdict(list)
        for segment in self.segments:
            by_stage[segment.stage].append(segment)
        return by_stage

    def segments_of_rank(self, rank: int) -> list[LocalSegment]:
        stages = sorted(self.passes.stages[rank])
        return [segment for stage in stages for segment in self.segments_by_stage[stage]]

    def parameters_of_rank(self, rank: int) -> list[HeldParameter]:
        return [p for segment in self.segments_of_rank(rank) for p in segment.parameters]

    def map_segments(self, change: Callable[[LocalSegment], LocalSegment]) -> StepCost:
        """Return the step with every segment changed."""
        return replace(self, segments=tuple(change(segment) for segment in self.segments))

    def map_parameters(self, change: Callable[[HeldParameter], HeldParameter]) -> StepCost:
        """Return the step with every parameter changed."""
        return self.map_segments(lambda s: s._replace(parameters=tuple(map(change, s.parameters))))

    def sent_bytes(self) -> float:
        """Return the bytes that the rank sends in a step that sends most."""
        return max(sum(self._sent(rank)) for rank in range(len(self.rows)))

    def _sent(self, rank: int) -> Iterator[float]:
        passes = self.microbatches * self.accumulate
        for segment in self.segments_of_rank(rank):
            each_pass = (
                *segment.before_forward,
                *segment.after_forward,
                *segment.before_backward,
                *segment.after_backward,
            )
            yield passes * sum(map(self._sent_of, each_pass))
            yield sum(map(self._sent_of, (*segment.beside, *segment.prefetched)))
        yield sum(map(self._sent_of, self.after_passes.get(rank, ())))
        yield sum(map(self._sent_of, self.after_step.get(rank, ())))

    def _sent_of(self, message: SentMessage) -> float:
        """Return the bytes that one rank sends: (n-1)/n of the tensor each way round a ring."""
        ranks = self.axis_size(message.axis)
        part = (ranks - 1) / ranks
        factor = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part}
        return message.share * message.size_bytes * factor.get(message.kind, 1.0)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks that take part in a message along an axis."""
        shard = self.shard_ranks or self.layout.data
        return {
            "data": self.layout.data,
            "shard": shard,
            "replicate": self.layout.data // shard,
            "tensor": self.layout.tensor,
            "pipeline": self.layout.pipeline,
        }.get(axis, 1)


def one_rank(
    model: ModelWork,
    module: Any,
    layout: RankLayout,
    global_batch: int,
    segment_time: SegmentTime,
    accumulate: int = 1,
    is_loop_loss: bool = False,
    known: dict[Any, Any] | None = None,
) -> StepCost:
    """Return the step of a rank that holds everything, from which all strategies start."""
    held = {
        p.name: HeldParameter(
            p.name,
            p.numel,
            p.nbytes,
            p.nbytes,
            p.nbytes if p.trainable else 0.0,
            p.optimizer_bytes,
        )
        for p in model.parameters
    }
    segments = [_local(work, held) for work in model.segments]
    if held:  # nothing of the forward pass reads them
        work = SegmentWork("", (), (), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, ())
        segments.append(
            LocalSegment(work, tuple(held.values()), NOTHING, NOTHING, NOTHING, NOTHING)
        )
    return StepCost(
        model,
        module,
        layout,
        global_batch,
        tuple(segments),
        segment_time,
        accumulate=accumulate,
        is_loop_loss=is_loop_loss,
        known={} if known is None else known,
    )


def _local(work: SegmentWork, held: dict[str, HeldParameter]) -> LocalSegment:
    parameters = tuple(held.pop(name) for name in work.parameters if name in held)
    return LocalSegment(
        work,
        parameters,
        work.kept,
        work.forward_extra,
        work.backward_extra,
        work.gradient_extra,
    )


def total(parameters: Iterable[HeldParameter]) -> float:
    """Return the bytes of whole gradients of what is trained."""
    return sum(p.nbytes for p in parameters if p.gradient_bytes)
