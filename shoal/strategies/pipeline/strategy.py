"""Pipeline parallel: each rank holds some layers, and micro-batches go through all ranks in turn.

      rank 0   [embed  block 0]   f0f1f2f3 · · · · · ·b0── ·b1── ·b2── ·b3──
      rank 1   [block 1]           ·f0f1f2 · · · ·b0──f3b1── ·b2── ·b3── · ·
      rank 2   [block 2]           · ·f0f1 · ·b0──f2b1──f3b2── ·b3── · · · ·
      rank 3   [norm  head]        · · ·f0b0──f1b1──f2b2──f3b3── · · · · · ·

f3 is the forward pass of micro-batch 3, and b3── its backward pass. The drawing is 1f1b; `shoal
schedule` draws the other schedules.

[1] *Partition.* The forward pass is traced, and cut so that stages take equally long. A shortcut
    over a cut is carried along. Parameters keep the names of the full model.
[2] *Run.* A table says which rank computes what in which order; each rank runs its row.
[3] *Totals.* The last stage knows loss, count and measures, and each rank knows its own stop
    request. One small sum over the pipeline gives all of them to all ranks. Gradients of tied
    parameters are summed over the stages that hold them.

The data-parallel strategy comes after that. It reduces gradients once, after all micro-batches.

Sources: Huang et al., NeurIPS 2019 (GPipe); Narayanan et al., SC 2021 (1F1B, interleaved); Qi et
al., ICLR 2024 (zero bubble). The tables of the last three, and the split backward pass, are those
of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import (
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
from shoal.strategies.pipeline.pipeline_summary import summary_lines
from shoal.strategies.pipeline.plan import PlanRequest, StagePlan, full_model, plan, trace_for
from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.schedules import problems, table
from shoal.strategies.pipeline.stage import Stage, apply_pre_hooks, stages
from shoal.strategies.pipeline.stage_module import StageModule, collect, unused
from shoal.strategies.pipeline.ties import Ties
from shoal.strategies.wrap_units import innermost, units

GRADS_NOT_READY = "a pipeline adds up the gradients of its micro-batches."
MICROBATCHES_PER_RANK = 4
"""Default number of micro-batches for each rank of a pipeline. 1F1B is then idle for at most a
fifth of the time.
"""


class _StagedModel(NamedTuple):
    """A model divided into stages, the same on all ranks.

    Attributes: stages: all stages, of all ranks.
    """

    table: ScheduleTable
    graph: Traced
    stage_plan: StagePlan
    full_model: FullModel
    stages: list[Stage]

    def rank_of(self) -> dict[int, int]:
        """Return stage -> rank."""
        return {stage: self.table.rank_of(stage) for stage in range(self.table.num_stages)}


class Pipeline(PipelineOptions, Strategy):
    """Pipeline parallel."""

    needs_example_batch: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Keep this rank's stages; replace `module`, `forward`, `run` and `trainable_params`.

        Collective.

        Raises: StrategyRefused: the model cannot be divided into these stages.
        """
        self._check(model)
        if mesh.pipeline.size == 1:
            return model
        mesh.pipeline.broadcast_module(model.module)
        partition = self._partition(model, mesh)
        _check_mutated_buffers(model.module, partition)
        summary = summary_lines(
            model.module,
            partition.table,
            partition.stage_plan,
            model.example.num_samples if model.example else 0,
            microbatches_chosen=self.microbatches == 0,
        )
        return _keep_local_stages(model, mesh, partition, summary)

    def _check(self, model: LocalModel) -> None:
        if self.ranks == 1:
            return
        if model.example is None:
            raise StrategyRefused(
                "pipeline: all ranks of a pipeline must see the same samples, which a prepared "
                "loader takes care of. Prepare a loader: run.prepare(model, optimizer, loader)."
            )
        module = model.module
        if (
            has_forward_hooks(module)
            or has_pre_hooks_with_keywords(module)
            or has_backward_hooks(module)
        ):
            raise StrategyRefused(
                "pipeline: the model itself has hooks on its output, its gradients or its named "
                "arguments, and no rank calls all of it. Put them on a module inside; hooks on "
                "positional inputs are called."
            )

    def _partition(self, model: LocalModel, mesh: Mesh) -> _StagedModel:
        """[1] Divide the model into stages. Collective over the world."""
        assert model.example is not None
        module = model.module
        schedule = self._table(model.example)
        sample = apply_pre_hooks(module, forward_pre_hooks(module), model.example.inputs)
        wrap_units = set(innermost(units(module)))
        graph = trace_for(module, schedule.num_stages, wrap_units, len(sample), sample)
        has_split_backward = any(action.kind == "W" for row in schedule.rows for action in row)
        if has_split_backward and graph.checked is not None and graph.checked.hooks:
            raise StrategyRefused(
                f"pipeline: schedule={self.schedule} takes backward passes in halves, and hooks on "
                "gradients that modules of the model have or register would act in both. Use "
                "schedule=1f1b or schedule=interleaved."
            )
        request = PlanRequest(schedule.num_stages, self.balance, self.cuts, model.colocations)
        stage_plan = plan(mesh, module, graph, request, sample)
        full = full_model(module, graph, stage_plan.stage_starts)
        return _StagedModel(
            schedule, graph, stage_plan, full, stages(module, *full.graphs, full.begins)
        )

    def _table(self, example: ExampleBatch) -> ScheduleTable:
        num_microbatches = self.microbatches or _default_microbatches(
            self.schedule, self.ranks, example.num_samples
        )
        return table(self.schedule, self.ranks, num_microbatches, self.stages)


def _keep_local_stages(
    model: LocalModel, mesh: Mesh, partition: _StagedModel, summary: Iterable[str]
) -> LocalModel:
    """Return the stages of this rank as its local model; free the tensors of all other stages."""
    module = model.module
    axis = mesh.pipeline
    local_stages = {
        stage: partition.stages[stage] for stage in partition.table.stages_of(axis.rank)
    }
    local_module = _collect_local(module, partition, local_stages, axis.rank)
    local_ids = {id(parameter) for parameter in local_module.parameters()}
    full_names = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {
        name: full_names[id(parameter)]
        for name, parameter in local_module.named_parameters()
        if full_names[id(parameter)] != name
    }
    shared = _tied_params(model.trainable_params, partition)
    trainable = {
        name: parameter
        for name, parameter in model.trainable_params.items()
        if id(parameter) in local_ids
    }
    free_other_params(module, local_module)
    for stage in local_stages.values():
        stage.home = local_module
    ties = Ties(axis, {name: shared[name] for name in sorted(shared)}, local_module, aliases)
    constants = partition.graph.constants
    executor = PipelineExecutor(
        module, partition.table, axis, local_stages, ties, constants, mesh.recorder
    )
    # Users evaluate by calling their model.
    module.forward = executor.evaluate
    return replace(
        model,
        module=local_module,
        forward=executor.forward,
        run=executor.run,
        trainable_params=trainable,
        pipeline_axis=axis,
        full_model=partition.full_model,
        duplicated_params=ties.owned_by_earlier_stage,
        tied_names=aliases,
        pass_traits=PassTraits(module_called=False, complete_after_run=True, recorded=True),
        grads_not_ready_reason=GRADS_NOT_READY,
        summary_lines=(*model.summary_lines, *summary),
    )


def _collect_local(
    module: nn.Module, partition: _StagedModel, local_stages: Mapping[int, Stage], rank: int
) -> StageModule:
    """Return what the stages of this rank use. The rank of stage 0 also holds what no stage uses,
    so that checkpoints are complete.
    """
    targets: set[str] = set().union(*(stage.targets for stage in local_stages.values()))
    others: set[str] = set()
    if partition.table.rank_of(0) == rank:
        others = unused(module, set().union(*(stage.targets for stage in partition.stages)))
    return collect(module, targets, others)


def _default_microbatches(schedule: str, ranks: int, num_samples: int) -> int:
    """Choose the number of micro-batches.

    The largest number up to MICROBATCHES_PER_RANK for each rank that the schedule allows. Numbers
    that divide the samples, and give each rank a micro-batch, come first. No micro-batch is empty.

    Args: num_samples: of a batch; 0 if unknown.
    """
    if schedule == "naive":
        return 1
    limit = MICROBATCHES_PER_RANK * ranks
    if num_samples:
        limit = min(limit, num_samples)
    allowed = [m for m in range(1, limit + 1) if not problems(schedule, ranks, m)]
    even = [m for m in allowed if num_samples % m == 0 and m >= ranks]
    return max(even or allowed)


def _tied_params(
    trainable: Mapping[str, nn.Parameter], partition: _StagedModel
) -> dict[str, list[int]]:
    """Return the trainable parameters that stages of several ranks use, with these ranks."""
    rank_of = partition.rank_of()
    users: dict[int, set[int]] = {}
    for index, stage in enumerate(partition.stages):
        for parameter in stage.parameters():
            users.setdefault(id(parameter), set()).add(rank_of[index])
    ranks_by_name = {
        name: sorted(users.get(id(parameter), set())) for name, parameter in trainable.items()
    }
    return {name: ranks for name, ranks in ranks_by_name.items() if len(ranks) > 1}


def _check_mutated_buffers(module: nn.Module, partition: _StagedModel) -> None:
    """Raise StrategyRefused if several ranks call a module that writes into its buffers.

    A buffer that nobody writes into, such as a mask or a table of sines, may have copies.
    """
    assert partition.graph.checked is not None, "a pipeline has a sample"
    mutated: Set[int] = partition.graph.checked.mutated_buffers
    rank_of = partition.rank_of()
    names = {id(inner): name for name, inner in module.named_modules()}
    users: dict[str, set[int]] = {}
    for index, stage in enumerate(partition.stages):
        for inner in stage.modules():
            if any(id(buffer) in mutated for buffer in inner.buffers(recurse=False)):
                users.setdefault(names[id(inner)], set()).add(rank_of[index])
    for path, ranks in users.items():
        if len(ranks) > 1:
            raise StrategyRefused(
                f"pipeline: {path} has buffers and is called in stages of ranks {sorted(ranks)}, "
                "whose copies would drift apart. Cut the model elsewhere with cuts=NAME, or give "
                "each place a module of its own."
            )
