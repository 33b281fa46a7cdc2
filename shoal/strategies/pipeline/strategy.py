"""Pipeline parallel: each rank holds some layers; micro-batches go through all ranks, one behind
the other.

      rank 0   [embed  block 0]   f0f1f2f3 · · · · · ·b0── ·b1── ·b2── ·b3──        f3  forward of micro-batch 3
      rank 1   [block 1]           ·f0f1f2 · · · ·b0──f3b1── ·b2── ·b3── · ·        b3  its backward
      rank 2   [block 2]           · ·f0f1 · ·b0──f2b1──f3b2── ·b3── · · · ·
      rank 3   [norm  head]        · · ·f0b0──f1b1──f2b2──f3b3── · · · · · ·        1f1b; `shoal schedule` draws others

[1] *Cut*: the forward pass is traced and cut where stages take equally long
    (`shoal/strategies/pipeline/fx_trace.py`, `plan.py`). Shortcuts over a cut are carried along.
    Parameters keep the model's own names.
[2] *Run*: a table says who computes what in which order (`schedules.py`); each rank runs its row
(`engine.py`). [3] *Agree*: the last stage knows loss, count and measures, each rank its own stop
request; one small sum over the
    pipeline tells all of them. Gradients of tied weights are summed over the stages that hold them.
The data strategy comes after that: its gradients are reduced once, when all micro-batches are
through.

Sources: Huang et al., NeurIPS 2019 (GPipe); Narayanan et al., SC 2021 (1F1B, interleaved); Qi et
al., ICLR 2024 (zero bubble). The tables of the last three and the backward pass in halves are those
of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import ClassVar

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import (
    BatchNormBase,
    forward_pre_hooks,
    has_backward_hooks,
    has_forward_hooks,
    has_pre_hooks_with_keywords,
)
from shoal.strategies.base import ExampleBatch, LocalModel, PassTraits, Strategy
from shoal.strategies.full_model import FullModel, free_other_params
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.executor import PipelineExecutor
from shoal.strategies.pipeline.fx_trace import Traced
from shoal.strategies.pipeline.plan import StagePlan, full_model, plan, trace_for
from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.schedule_timing import bubble_fractions, timeline
from shoal.strategies.pipeline.schedules import problems, table
from shoal.strategies.pipeline.stage import (
    Stage,
    apply_pre_hooks,
    collect,
    stages,
    unused,
)
from shoal.strategies.pipeline.ties import Ties
from shoal.strategies.wrap_units import has_dropout, innermost, units

LATE = "a pipeline adds up the gradients of its micro-batches."
MICROBATCHES_PER_RANK = 4
"""Micro-batches for each rank of a pipeline, unless it is said: 1F1B is idle for a fifth of the
time or less.
"""


class Pipeline(PipelineOptions, Strategy):
    """Pipeline parallel."""

    needs_example_batch: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces module, forward, run, owned. Collective.

        Raises: StrategyRefused: a model that cannot be cut so.
        """
        self._refuse(model)
        if mesh.pipeline.size == 1:
            return model
        mesh.pipeline.broadcast_module(model.module)
        chosen = self._table(model.example_inputs)
        where, uncut, graph = self._stage_placement(model, mesh, chosen)
        return _cut(model, mesh, chosen, where, uncut, graph, self.microbatches == 0)

    def _refuse(self, part: LocalModel) -> None:
        if self.ranks > 1 and part.example_inputs is None:
            raise StrategyRefused(
                "pipeline: all ranks of a pipeline must see the same samples, which a prepared "
                "loader takes care of. "
                "Prepare a loader: run.prepare(model, optimizer, loader)."
            )
        model = part.module
        seen = has_forward_hooks(model) or has_pre_hooks_with_keywords(model)
        if self.ranks > 1 and (seen or has_backward_hooks(model)):
            raise StrategyRefused(
                "pipeline: the model itself has hooks on its output, its gradients or its named "
                "arguments, and no rank "
                "calls all of it. Put them on a module inside; hooks on positional inputs are "
                "called."
            )

    def _table(self, sample: ExampleBatch | None) -> ScheduleTable:
        wanted = self.microbatches or _chosen(
            self.schedule, self.ranks, 0 if sample is None else sample.num_samples
        )
        return table(self.schedule, self.ranks, wanted, self.stages)

    def _stage_placement(
        self, part: LocalModel, mesh: Mesh, chosen: ScheduleTable
    ) -> tuple[StagePlan, FullModel, Traced]:
        assert part.example_inputs is not None
        inputs = apply_pre_hooks(
            part.module, forward_pre_hooks(part.module), part.example_inputs.inputs
        )
        whole = set(innermost(units(part.module)))
        graph = trace_for(part.module, chosen.num_stages, whole, len(inputs), inputs)
        halved = any(action.kind == "W" for row in chosen.rows for action in row)
        if halved and graph.checked is not None and graph.checked.hooks:
            raise StrategyRefused(
                f"pipeline: schedule={self.schedule} takes backward passes in halves, and hooks on "
                "gradients that "
                "modules of the model have or register would act in both. Use schedule=1f1b or "
                "schedule=interleaved."
            )
        num_stages, balance = chosen.num_stages, self.balance
        where = plan(
            mesh, part.module, graph, num_stages, balance, self.cuts, inputs, part.colocations
        )
        return where, full_model(part.module, graph, where.stage_starts), graph


def _cut(
    part: LocalModel,
    mesh: Mesh,
    chosen: ScheduleTable,
    where: StagePlan,
    uncut: FullModel,
    graph: Traced,
    free: bool,
) -> LocalModel:
    model, axis = part.module, mesh.pipeline
    pieces = stages(model, *uncut.graphs, uncut.begins)
    homes = {stage: chosen.rank_of(stage) for stage in range(chosen.num_stages)}
    assert graph.checked is not None, "a pipeline has a sample"
    _refuse_shared_buffers(model, pieces, homes, graph.checked.mutated_buffers)
    mine = chosen.stages_of(axis.rank)
    others = (
        unused(model, set().union(*(piece.targets for piece in pieces)))
        if homes[0] == axis.rank
        else set()
    )
    kept = collect(model, set().union(*(pieces[stage].targets for stage in mine)), others)
    here = {id(parameter) for parameter in kept.parameters()}
    owned = {
        name: parameter
        for name, parameter in part.trainable_params.items()
        if id(parameter) in here
    }
    shared = _tied_params(part.trainable_params, model, pieces, homes)
    said = _describe(model, chosen, where, part, free)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {n: names[id(p)] for n, p in kept.named_parameters() if names[id(p)] != n}
    free_other_params(model, kept)
    for stage in mine:
        pieces[stage].home = kept
    ties = Ties(axis, {name: shared[name] for name in sorted(shared)}, kept, aliases)
    staged = PipelineExecutor(
        model,
        chosen,
        axis,
        {stage: pieces[stage] for stage in mine},
        ties,
        graph.constants,
        mesh.recorder,
    )
    model.forward = staged.evaluate
    return replace(
        part,
        module=kept,
        forward=staged.forward,
        run=staged.run,
        trainable_params=owned,
        pipeline_axis=axis,
        full_model=uncut,
        duplicated_params=ties.owned_by_earlier_stage,
        tied_names=aliases,
        pass_traits=PassTraits(module_called=False, complete_after_run=True, recorded=True),
        grads_not_ready_reason=LATE,
        summary_lines=(*part.summary_lines, *said),
    )


def _chosen(schedule: str, ranks: int, rows: int) -> int:
    """Micro-batches where none were asked for: four for each rank, but of a sample at least."""
    if schedule == "naive":
        return 1
    most = MICROBATCHES_PER_RANK * ranks if rows == 0 else min(MICROBATCHES_PER_RANK * ranks, rows)
    fitting = [m for m in range(1, most + 1) if not problems(schedule, ranks, m)]
    return max((m for m in fitting if rows % m == 0 and m >= ranks), default=max(fitting))


def _tied_params(
    owned: Mapping[str, nn.Parameter],
    model: nn.Module,
    pieces: list[Stage],
    homes: Mapping[int, int],
) -> dict[str, list[int]]:
    """Trained parameters that stages of several ranks use, with these ranks."""
    users: dict[int, set[int]] = {}
    for stage, piece in enumerate(pieces):
        for parameter in piece.parameters():
            users.setdefault(id(parameter), set()).add(homes[stage])
    found = {name: sorted(users.get(id(parameter), set())) for name, parameter in owned.items()}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _refuse_shared_buffers(
    model: nn.Module, pieces: list[Stage], homes: Mapping[int, int], written: Set[int]
) -> None:
    """Raise StrategyRefused where a module with running statistics is called on several ranks,
    by whatever name.
    """
    names = {id(module): name for name, module in model.named_modules()}
    users: dict[str, set[int]] = {}
    for stage, piece in enumerate(pieces):
        for module in piece.modules():
            # What nobody writes into, such as a mask or a table of sines, may have copies.
            if any(id(buffer) in written for buffer in module.buffers(recurse=False)):
                users.setdefault(names[id(module)], set()).add(homes[stage])
    for path, ranks in users.items():
        if len(ranks) > 1:
            raise StrategyRefused(
                f"pipeline: {path} has buffers and is called in stages of ranks {sorted(ranks)}, "
                "whose copies would "
                "drift apart. Cut the model elsewhere with cuts=NAME, or give each place a module "
                "of its own."
            )


def _describe(
    model: nn.Module, chosen: ScheduleTable, where: StagePlan, part: LocalModel, free: bool
) -> list[str]:
    what = "time" if where.measured else "parameters"
    shares = " | ".join(f"{100 * share:.0f} %" for share in where.cost_fractions)
    said = [
        f"pipeline of {chosen.num_ranks} ranks, cut before {', '.join(where.names)}: {what} "
        f"{shares}"
    ]
    rows = part.example_inputs.num_samples if part.example_inputs else 0
    idle = 100 * max(bubble_fractions(timeline(chosen)))
    said.append(
        f"{chosen.name}, {chosen.num_microbatches} micro-batches{' (chosen)' if free else ''} of "
        f"{rows} rows: stages "
        f"of equal time would be idle for {idle:.0f} % of a step"
    )
    if chosen.num_microbatches > max(rows, 1):
        said.append(
            f"{rows} samples fill {rows} of {chosen.num_microbatches} micro-batches; the rest is "
            "idle time"
        )
    return said + _trace_differences(model, chosen.num_microbatches)


def _trace_differences(model: nn.Module, microbatches: int) -> list[str]:
    notes = []
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNormBase)]
    if norms and microbatches > 1:
        notes.append(
            f"note: BatchNorm ({norms[0]} and {len(norms) - 1} more) normalises over one "
            "micro-batch at a time, so "
            "gradients differ from one device by design; GroupNorm has no such difference. Its "
            "running statistics are "
            "those of the whole batch."
        )
    dropping = [name for name, m in model.named_modules() if has_dropout(m)]
    if dropping:
        notes.append(
            f"note: dropout ({dropping[0]}, ...) draws for one micro-batch at a time, in a stream "
            "of its own on every "
            "rank: same law, other masks."
        )
    return notes
