"""Cost of tensor parallelism: layers in slices, and sums of activations over the tensor group.

      x whole ─> column ─> slices: 1/T of operations, activations, weights ─> row ─> sum, y whole
                 └ backward: sum of x's gradient                              └ forward: sum of y

All sums are waited for. What is divided is what the strategy's own plan says. With sequence=true,
what lies between the regions is divided along the sequence, and each sum becomes a reduce-scatter
and an all-gather of the same bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.costs.step_cost import HeldParameter, LocalSegment, SentMessage, StepCost
from shoal.strategies.full_model import enclosing, prefixes
from shoal.strategies.tensor.plan import TensorPlan


def cost(made: TensorPlan, sequence: bool, step: StepCost) -> StepCost:
    """Return a step whose divided layers cost 1/T, with the sums that they need.

    Args: made: the plan for the model. sequence: option of the strategy.
    """
    segments = list(step.segments)
    segments_of = step.once("segments of modules", lambda: _segments_of_modules(step))
    regions = [*_regions(made, segments_of, len(segments))]
    part = 1 / made.degree
    inside: set[int] = set()
    for first, last in regions:
        inside |= {*range(first, last + 1)}
        entering = step.segments[max(first - 1, 0)].work.output_bytes.at(step.samples)
        leaving = step.segments[last].work.output_bytes.at(step.samples)
        segments[first] = _with_sum(segments[first], entering or leaving, backward=True)
        if last < len(segments) - 1:  # logits stay in slices
            segments[last] = _with_sum(segments[last], leaving, backward=False)
    for name in made.embeddings:
        for index in segments_of.get(name, ()):
            output = step.segments[index].work.output_bytes.at(step.samples)
            segments[index] = _with_sum(segments[index], output, backward=False)
    row_ends = {last for _, last in regions}
    for index in sorted(inside):
        segments[index] = _divided(segments[index], part, whole_output=index in row_ends)
    if sequence:
        between = {*range(min(inside), max(inside))} - inside
        for index in between:
            segments[index] = _divided(segments[index], part, whole_output=False)
    step = replace(step, segments=tuple(segments))
    step = step.map_parameters(_slicing(made, step))
    owned = sum(p.numel for segment in step.segments for p in segment.parameters)
    share = owned / max(step.model.numel, 1)
    return replace(step, optimizer_share=share)


SegmentsOf = Mapping[str, Sequence[int]]
"""name of a module -> indices of the segments of its code and of the modules inside."""


def _segments_of_modules(step: StepCost) -> SegmentsOf:
    found: dict[str, list[int]] = defaultdict(list)
    for index, segment in enumerate(step.segments):
        for name in prefixes(segment.work.path):
            found[name].append(index)
    return dict(found)


def _regions(made: TensorPlan, segments_of: SegmentsOf, segments: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last segment of each stretch that computes slices."""
    pairs = [
        *((heads.columns, heads.row) for heads in made.heads),
        *((pair.columns, pair.row) for pair in made.pairs),
        *(((name,), name) for name in made.multihead),
    ]
    for columns, row in pairs:
        begins = [index for name in columns for index in segments_of.get(name, ())]
        if begins:
            yield min(begins), max(segments_of.get(row, begins))
    for name in made.vocabulary_heads:  # the loss takes logits in slices
        if name in segments_of:
            yield min(segments_of[name]), segments - 1


def _with_sum(segment: LocalSegment, size_bytes: float, backward: bool) -> LocalSegment:
    message = SentMessage("all_reduce", size_bytes, "tensor", around=(("tensor sum", 1),))
    if backward:
        return segment._replace(after_backward=(*segment.after_backward, message))
    return segment._replace(after_forward=(*segment.after_forward, message))


def _divided(segment: LocalSegment, part: float, whole_output: bool) -> LocalSegment:
    """Return a segment of which a rank computes and keeps `part`."""
    kept, forward_extra = segment.kept, segment.forward_extra
    return segment._replace(
        compute=segment.compute * part,
        kept=kept if whole_output else kept.scaled(part),
        forward_extra=forward_extra if whole_output else forward_extra.scaled(part),
        backward_extra=segment.backward_extra.scaled(part),
        gradient_extra=segment.gradient_extra.scaled(part),
    )


def _slicing(made: TensorPlan, step: StepCost) -> Callable[[HeldParameter], HeldParameter]:
    """Return a function that tells the share of a parameter that one rank holds."""
    styles = made.parallel_styles()
    shapes = {p.name: p.shape for p in step.model.parameters}

    def sliced(parameter: HeldParameter) -> HeldParameter:
        owner = parameter.name.rpartition(".")[0]
        style = styles.get(enclosing(owner, styles) or "", "")
        # The bias of a row parallel layer is added after the sum, so every rank has all of it.
        whole = style.startswith("row") and len(shapes[parameter.name]) == 1
        if not style or whole:
            return parameter
        return HeldParameter(parameter.name, *(x / made.degree for x in parameter[1:]))

    return sliced
