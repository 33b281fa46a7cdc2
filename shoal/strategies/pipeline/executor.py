"""One rank's stages at work: a step through the pipeline, and an evaluation through it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.module_state import forward_pre_hooks
from shoal.platform.torch_private.pytree import (
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from shoal.strategies.base import (
    STOP,
    TOTALS_LENGTH,
    Forward,
    ForwardOutput,
    LocalBatch,
    StepResult,
    weighted_loss,
)
from shoal.strategies.microbatch import split_microbatches
from shoal.strategies.pipeline.constants import Constants
from shoal.strategies.pipeline.deferred_batchnorm import DeferredBatchNorm
from shoal.strategies.pipeline.engine import ScheduleExecutor, StageOutput
from shoal.strategies.pipeline.p2p import P2PLink, StageComm, message_after, message_before
from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable
from shoal.strategies.pipeline.stage import Stage, apply_pre_hooks
from shoal.strategies.pipeline.ties import Ties
from shoal.trace.recorder import Recorder

SUM_COUNT_INDEX = TOTALS_LENGTH
"""In the sum over the pipeline: whether the loss counted for itself."""


class PipelineExecutor:
    """What one rank does in a pipeline.

    Args:
        model: the user's own; this rank's modules in it are alive.
        table: who computes what.
        axis: of the pipeline.
        stages: of this rank, by number.
        constants: what they take for granted.
        recorder: is told of each pass and each message.
    """

    def __init__(
        self,
        model: nn.Module,
        table: ScheduleTable,
        axis: Axis,
        stages: Mapping[int, Stage],
        ties: Ties,
        constants: Constants,
        recorder: Recorder,
    ) -> None:
        self.model, self.table, self.axis, self.stages = model, table, axis, stages
        self.ties, self.constants, self.wire = ties, constants, P2PLink(axis, recorder)
        self.hooks = forward_pre_hooks(model)
        self.last = table.num_stages - 1
        self.statistics = DeferredBatchNorm(
            [m for stage in stages.values() for m in stage.modules()]
        )
        floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.dtype = accumulation_dtype(floating[0] if floating else torch.float32)

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """One stage; of the last one, the loss too."""
        output = self.stages[batch.stage](self.model.training, *batch.inputs, *batch.values)
        if batch.stage == self.last:
            return weighted_loss(output, batch)
        nothing = torch.zeros((), device=self.axis.device)
        return ForwardOutput(nothing, nothing, False, values=output)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """All micro-batches through all stages; gradients add up in `.grad`. Collective over
        the pipeline.
        """
        self.constants.refuse_changes()
        count = self.table.num_microbatches
        batch = batch._replace(inputs=apply_pre_hooks(self.model, self.hooks, batch.inputs))
        # Every rank makes as many as the table has; where samples are fewer, stand-ins that weigh
        # nothing fill up.
        micros = list(
            split_microbatches(
                batch._replace(previous_totals=None, stop_requested=False), count, least=count
            )
        )
        outcomes: list[ForwardOutput] = []

        def compute(stage: int, microbatch: int, values: tuple[Tensor, ...]) -> StageOutput:
            micro = micros[microbatch]
            with self.statistics.counting(micro.num_samples, stage):
                outcome = forward(micro._replace(stage=stage, values=values))
            if stage == self.last:
                outcomes.append(outcome._replace(loss=outcome.step_totals))  # not its graph
            return StageOutput(outcome.values, outcome.loss if stage == self.last else None)

        key_of = cache(
            lambda microbatch: self._key(micros[microbatch].inputs)
        )  # asked several times for each message
        exchange = StageComm(self.wire, self.table, key_of)
        for _ in ScheduleExecutor(
            self.table, exchange, compute, lambda stage: self.stages[stage].parameters()
        ).run():
            pass
        self.statistics.commit()
        if batch.is_last_microbatch:
            self.ties.sum()
        return self._reduce_totals(outcomes, batch)

    def evaluate(self, *inputs: Any) -> Any:
        """The model's output, on every rank of the pipeline, without a graph. Collective over
        the pipeline.
        """
        self.constants.refuse_changes()
        with torch.no_grad():
            output = self._run_stages(inputs)
            return self._broadcast_output(output)

    def _run_stages(self, inputs: tuple[Any, ...]) -> Any:
        """The batch in one piece, stage after stage; None on ranks without the last one."""
        exchange = StageComm(
            self.wire,
            _as_single_stage(self.table),
            lambda _: ("evaluation", self._key(inputs)),
            backward=False,
        )
        output = None
        for stage, module in self.stages.items():
            action = Action("F", stage, 0)
            message = message_before(self.table, action)
            values = exchange.recv_forward(message)[0] if message else []
            output = module(self.model.training, *inputs, *values)
            after = message_after(self.table, action)
            if after is not None:
                exchange.send_forward(after, output)
        self.wire.flush()
        return output if self.last in self.stages else None

    def _broadcast_output(self, output: Any) -> Any:
        """The last stage's output on every rank."""
        source = self.table.rank_of(self.last)
        leaves, spec = tree_flatten(output)
        forms = [
            [str(x.dtype)[6:], list(x.shape)] if isinstance(x, Tensor) else {"is": x}
            for x in leaves
        ]
        said = json.dumps([treespec_dumps(spec), forms]) if self.axis.rank == source else ""
        spec_text, forms = json.loads(next(text for text in self.axis.all_gather_str(said) if text))
        found = []
        for index, form in enumerate(forms):
            if isinstance(form, dict):
                found.append(form["is"])
                continue
            tensor = torch.empty(form[1], dtype=getattr(torch, form[0]), device=self.axis.device)
            if self.axis.rank == source:
                tensor.copy_(
                    leaves[index]
                )  # a plain tensor, whatever kind the model gives: logits in slices, say
            dist.broadcast(tensor, group=self.axis.group, group_src=source)
            found.append(tensor)
        return tree_unflatten(found, treespec_loads(spec_text))

    def _key(self, inputs: tuple[Any, ...]) -> Hashable:
        """What the shapes of all values follow from."""
        shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(inputs))
        return self.model.training, torch.is_grad_enabled(), shapes

    def _reduce_totals(self, outcomes: list[ForwardOutput], batch: LocalBatch) -> StepResult:
        """[3] Totals of the last stage and everybody's stop requests, on every rank."""
        totals = torch.zeros(TOTALS_LENGTH + 1, dtype=torch.float64, device=self.axis.device)
        for outcome in outcomes:
            totals[:TOTALS_LENGTH] += outcome.step_totals
            totals[SUM_COUNT_INDEX] = outcome.is_sum_and_count
        totals[STOP] = batch.stop_requested * batch.grad_weight
        totals = self.axis.all_reduce(totals)
        weighed = bool(totals[SUM_COUNT_INDEX])
        sums = totals[:TOTALS_LENGTH].to(self.dtype)
        if batch.previous_totals is not None:
            sums = sums + batch.previous_totals
        return StepResult(sums, weighed)


def _as_single_stage(table: ScheduleTable) -> ScheduleTable:
    """One micro-batch forward through all stages of a table."""
    rows = tuple(
        tuple(Action("F", stage, 0) for stage in table.stages_of(rank))
        for rank in range(table.num_ranks)
    )
    return ScheduleTable(table.name, rows, table.num_stages, 1)
