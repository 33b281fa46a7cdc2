"""Pipeline parallel: each rank holds some layers, and micro-batches go through all ranks in turn.

      rank 0   [embed  block 0]   f0f1f2f3 · · · · · ·b0── ·b1── ·b2── ·b3──
      rank 1   [block 1]           ·f0f1f2 · · · ·b0──f3b1── ·b2── ·b3── · ·
      rank 2   [block 2]           · ·f0f1 · ·b0──f2b1──f3b2── ·b3── · · · ·
      rank 3   [norm  head]        · · ·f0b0──f1b1──f2b2──f3b3── · · · · · ·

f3 is the forward pass of micro-batch 3, and b3── its backward pass. The drawing is 1f1b; `shoal
schedule` draws the other schedules.

[1] *Partition.* The user's function is run on a sample, and divided between calls of the model's
    blocks so that stages take equally long. Every rank runs the function itself; blocks of other
    stages are absent (`walk.py`). Parameters keep the names of the full model.
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
from functools import partial
from typing import ClassVar

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import BatchNormBase, hooks_of
from shoal.strategies.base import ExampleBatch, LocalModel, PipelineTraits, Strategy
from shoal.strategies.full_model import free_other_params
from shoal.strategies.loss_terms import LOOP_IN_PIPELINE
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.cost import cost
from shoal.strategies.pipeline.division import DividedModel, StageModule, collect, unused
from shoal.strategies.pipeline.executor import PipelineExecutor, Ties, route_calls
from shoal.strategies.pipeline.observed_units import UnitProfile, observe_units
from shoal.strategies.pipeline.plan import (
    agreed,
    dry_run,
    plan,
    units_of_first_rank,
    users_on_any_rank,
)
from shoal.strategies.pipeline.schedule_timing import bubble_fractions, timeline
from shoal.strategies.pipeline.schedules import ScheduleTable, problems, table
from shoal.strategies.pipeline.walk import DryRun
from shoal.strategies.wrap_units import has_dropout
from shoal.weights.deferred_init import broadcast_filled

MICROBATCHES_PER_RANK = 4
"""Default number of micro-batches for each rank of a pipeline. 1F1B is then idle for at most a
fifth of the time.
"""


class Pipeline(PipelineOptions, Strategy):
    """Pipeline parallel."""

    needs_example_batch: ClassVar[bool] = True
    takes_empty_weights: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Keep this rank's stages; replace `module`, `forward`, `run` and `trainable_params`.

        Collective.

        Raises: StrategyRefused: the model cannot be divided into these stages.
        """
        if self.ranks > 1 and model.example is None:
            raise StrategyRefused(
                "pipeline: all ranks of a pipeline must see the same samples, which a prepared "
                "loader takes care of. Prepare a loader: run.prepare(model, optimizer, loader)."
            )
        if mesh.pipeline.size == 1:
            return model
        assert model.example is not None
        # Stages come from the ranks of one pipeline: together they must be one model.
        broadcast_filled(model.module, mesh.pipeline)
        divided, cuts = self._divide(model, model.example, mesh)
        samples = model.example.num_samples
        summary = self._summary_lines(model.module, divided.table, cuts, samples)
        return _keep_local_stages(model, mesh, divided, summary)

    def cost(self, step: StepCost) -> StepCost:
        """Return the cost of stages: `pipeline/cost.py`.

        Raises: StrategyRefused: the model has too few units, or the loop computes the loss.
        """
        if step.layout.pipeline == 1:
            return step
        if step.is_loop_loss:
            raise StrategyRefused(LOOP_IN_PIPELINE)
        return cost(self, self._num_microbatches(step.local_batch), step)

    def _divide(
        self, model: LocalModel, example: ExampleBatch, mesh: Mesh
    ) -> tuple[DividedModel, str]:
        """[1] Divide the model into stages. Collective over the world.

        Returns: the divided model, and the cuts in words.
        """
        module = model.module
        schedule = self._table(example, module)
        # What has no memory yet takes no time that could be measured.
        options = self if model.weights is None else replace(self, balance="parameters")
        function = partial(example.compute_loss, *example.args, **example.kwargs)
        # Ranks see other samples, so they may find other units, or one of them a refusal. After
        # each look they agree (`plan.py`): else one would raise while the others wait for it.
        observed = agreed(mesh, partial(observe_units, module, function, options, mesh.device))
        observed = units_of_first_rank(mesh, observed, function)
        agreed(mesh, partial(self._check_halves, schedule, observed, module))
        starts, cuts = plan(mesh, observed, options, function)
        stage_map = observed.stage_map(starts)

        dry: DryRun = agreed(mesh, partial(dry_run, observed, stage_map, function))
        users = users_on_any_rank(mesh, dry.parameter_users)
        divided = DividedModel(observed.units, stage_map, users, schedule)
        found = observed.mutated_buffers
        buffers = [*module.named_buffers(remove_duplicate=False)]
        written: dict[str, set[int]] = {name: set() for name, b in buffers if id(b) in found}
        names = users_on_any_rank(mesh, written)
        mutated = {id(buffer) for name, buffer in buffers if name in names}
        _check_mutated_buffers(module, divided, mutated)
        return divided, cuts

    def _summary_lines(
        self, model: nn.Module, table: ScheduleTable, cuts: str, num_samples: int
    ) -> list[str]:
        """Describe a pipeline for batches of `num_samples` on one rank."""
        idle = 100 * max(bubble_fractions(timeline(table)))
        chosen = "" if self.microbatches else " (chosen)"
        lines = [
            f"pipeline of {table.num_ranks} ranks, {cuts}",
            f"{table.name}, {num_samples} rows in {table.num_microbatches} micro-batches{chosen}: "
            f"stages of equal time would be idle for {idle:.0f} % of a step",
        ]
        if table.num_microbatches > max(num_samples, 1):
            lines.append(
                f"{num_samples} samples fill {num_samples} of {table.num_microbatches} "
                "micro-batches; the rest is idle time"
            )
        return lines + _numeric_notes(model, table.num_microbatches)

    def _check_halves(
        self, schedule: ScheduleTable, observed: UnitProfile, module: nn.Module
    ) -> None:
        in_halves = any(action.kind == "W" for row in schedule.rows for action in row)
        has_hooks = observed.registers_hooks or any(
            hooks_of(inner, "backward", "backward_pre") for inner in module.modules()
        )
        if in_halves and has_hooks:
            raise StrategyRefused(
                f"pipeline: schedule={self.schedule} takes backward passes in halves, and hooks on "
                "gradients that modules of the model have or register would act in both. Use "
                "schedule=1f1b or schedule=interleaved."
            )

    def _table(self, example: ExampleBatch, module: nn.Module) -> ScheduleTable:
        # A BatchNorm of vectors takes the variance of the samples of a micro-batch.
        has_norm = any(isinstance(inner, nn.BatchNorm1d) for inner in module.modules())
        num_samples = example.num_samples // 2 if has_norm else example.num_samples
        microbatches = self._num_microbatches(num_samples)
        return table(self.schedule, self.ranks, microbatches, self.stages)

    def _num_microbatches(self, num_samples: int) -> int:
        """Return the number of micro-batches that was asked for, or choose it.

        The largest number up to MICROBATCHES_PER_RANK for each rank that the schedule allows.
        Numbers that divide the samples, and give each rank a micro-batch, come first. No
        micro-batch is empty.

        Args: num_samples: of a batch; 0 if unknown.
        """
        if self.microbatches or self.schedule == "naive":
            return self.microbatches or 1
        limit = MICROBATCHES_PER_RANK * self.ranks
        if num_samples:
            limit = min(limit, num_samples)
        allowed = [m for m in range(1, limit + 1) if not problems(self.schedule, self.ranks, m)]
        even = [m for m in allowed if num_samples % m == 0 and m >= self.ranks]
        return max(even or allowed)


def _keep_local_stages(
    model: LocalModel, mesh: Mesh, divided: DividedModel, summary: Iterable[str]
) -> LocalModel:
    """Return the stages of this rank as its local model; free the tensors of all other stages."""
    module = model.module
    axis = mesh.pipeline
    local_module = _collect_local(module, divided, axis.rank)
    local_ids = {id(parameter) for parameter in local_module.parameters()}
    full_names = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {
        name: full_names[id(parameter)]
        for name, parameter in local_module.named_parameters()
        if full_names[id(parameter)] != name
    }
    shared = _tied_params(model.trainable_params, divided)
    trainable = {
        name: parameter
        for name, parameter in model.trainable_params.items()
        if id(parameter) in local_ids
    }
    # Here memory is saved: until now every rank has held the full model.
    free_other_params(module, local_module)
    if model.weights is not None:
        model.weights.fill([local_module], keeps=True)
    ties = Ties(axis, {name: shared[name] for name in sorted(shared)}, local_module, aliases)
    executor = PipelineExecutor(divided, local_module, axis, ties, mesh.recorder)
    for user_model in model.example.called_models if model.example else ():
        route_calls(user_model, executor)
    return replace(
        model,
        module=local_module,
        forward=executor.forward,
        run=executor.run,
        trainable_params=trainable,
        outside_step=replace(model.outside_step, call=executor.evaluate),
        pipeline=PipelineTraits(
            axis,
            divided.table.num_microbatches,
            divided.full_model,
            {name for name, ranks in shared.items() if axis.rank in ranks[1:]},
            tied_names=aliases,
        ),
        summary_lines=(*model.summary_lines, *summary),
    )


def _collect_local(module: nn.Module, divided: DividedModel, rank: int) -> StageModule:
    """Return what the stages of this rank use. The rank of stage 0 also holds what no stage uses,
    so that checkpoints are complete.
    """
    targets: set[str] = set()
    for stage in divided.table.stages_of(rank):
        targets |= divided.targets(stage)
    others: set[str] = set()
    if divided.table.rank_of(0) == rank:
        all_targets = map(divided.targets, range(divided.table.num_stages))
        others = unused(module, set().union(*all_targets))
    everywhere = divided.everywhere()
    return collect(module, targets | everywhere, others - everywhere)


def _tied_params(
    trainable: Mapping[str, nn.Parameter], divided: DividedModel
) -> dict[str, list[int]]:
    """Return the trainable parameters that stages of several ranks use, with these ranks."""
    users: dict[int, set[int]] = {}
    for stage in range(divided.table.num_stages):
        for parameter in divided.parameters(stage):
            users.setdefault(id(parameter), set()).add(divided.table.rank_of(stage))
    ranks_by_name = {
        name: sorted(users.get(id(parameter), set())) for name, parameter in trainable.items()
    }
    return {name: ranks for name, ranks in ranks_by_name.items() if len(ranks) > 1}


def _check_mutated_buffers(module: nn.Module, divided: DividedModel, mutated: Set[int]) -> None:
    """Raise StrategyRefused if several ranks call a module that writes into its buffers.

    A buffer that nobody writes into, such as a mask or a table of sines, may have copies.

    Args: mutated: ids of the buffers that the user's function writes into.
    """
    names = {id(inner): name for name, inner in module.named_modules()}
    users: dict[str, set[int]] = {}
    for stage in range(divided.table.num_stages):
        for inner in divided.modules(stage):
            if any(id(b) in mutated for b in inner.buffers(recurse=False)):
                users.setdefault(names[id(inner)], set()).add(divided.table.rank_of(stage))
    for path, ranks in users.items():
        if len(ranks) > 1:
            raise StrategyRefused(
                f"pipeline: {path} has buffers and is called in stages of ranks {sorted(ranks)}, "
                "whose copies would drift apart. Cut the model elsewhere with cuts=NAME, or give "
                "each place a module of its own."
            )


def _numeric_notes(model: nn.Module, num_microbatches: int) -> list[str]:
    """Name the modules whose numbers differ from one device by design."""
    notes = []
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNormBase)]
    if norms and num_microbatches > 1:
        notes.append(
            f"note: BatchNorm ({norms[0]} and {len(norms) - 1} more) normalises over one "
            "micro-batch at a time, so gradients differ from one device by design, and its running "
            "statistics take an update from each; GroupNorm has no such difference."
        )
    dropouts = [name for name, m in model.named_modules() if has_dropout(m)]
    if dropouts:
        notes.append(
            f"note: dropout ({dropouts[0]}, ...) draws for one micro-batch at a time, in each "
            "block from a stream of its own: same distribution, other masks."
        )
    return notes
