"""The stages of one rank in use: a training step through the pipeline, and an evaluation."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.data.seeds import preserve_rng_state
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
)
from shoal.strategies.local_step import compute_weighted_loss
from shoal.strategies.microbatch import split_microbatches
from shoal.strategies.pipeline.constants import Constants
from shoal.strategies.pipeline.deferred_batchnorm import DeferredBatchNorm
from shoal.strategies.pipeline.engine import ScheduleExecutor, StageOutput
from shoal.strategies.pipeline.model_call import call_arguments, replaced_forward
from shoal.strategies.pipeline.p2p import P2PLink, StageComm
from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable
from shoal.strategies.pipeline.stage import Stage, apply_pre_hooks
from shoal.strategies.pipeline.stage_messages import message_after, message_before
from shoal.strategies.pipeline.ties import Ties
from shoal.trace.recorder import Recorder

SUM_COUNT_INDEX = TOTALS_LENGTH
"""Index of one more number in the sum over the pipeline: `is_sum_and_count` of the loss."""


class PipelineExecutor:
    """One rank of a pipeline.

    Args:
        model: the user's model; only the modules of this rank have memory.
        table: the schedule.
        axis: the pipeline axis.
        stages: stage index -> stage, for the stages of this rank.
        ties: sums the gradients of tied parameters.
        constants: the assumptions of the traced graphs.
        recorder: records passes and messages in a trace.
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
        self.model = model
        self.table = table
        self.axis = axis
        self.stages = stages
        self.ties = ties
        self.constants = constants
        self.link = P2PLink(axis, recorder)
        self.hooks = forward_pre_hooks(model)
        self.last_stage = table.num_stages - 1
        modules = [module for stage in stages.values() for module in stage.modules()]
        self.batchnorm = DeferredBatchNorm(modules)
        floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.dtype = accumulation_dtype(floating[0] if floating else torch.float32)

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Run stage `batch.stage` on a micro-batch; the last stage computes the loss too."""
        inputs = self._inputs_of(batch)
        output = self.stages[batch.stage](self.model.training, *inputs, *batch.values)
        if batch.stage == self.last_stage:
            with replaced_forward(self.model, lambda *_, **__: output):
                return compute_weighted_loss(batch)
        zero = torch.zeros((), device=self.axis.device)
        return ForwardOutput(zero, zero, False, values=output)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Send all micro-batches through all stages; gradients add up in `.grad`.

        Collective over the pipeline.

        Args:
            forward: `self.forward`, or a function that other strategies have put around it.
        """
        self.constants.check_unchanged()
        count = self.table.num_microbatches
        # Every rank runs as many micro-batches as the table has. Where samples are fewer, stand-ins
        # of zero samples fill up.
        single = batch._replace(previous_totals=None, stop_requested=False)
        microbatches = list(split_microbatches(single, count, min_count=count))
        outputs: list[ForwardOutput] = []

        def compute(stage: int, microbatch: int, values: tuple[Tensor, ...]) -> StageOutput:
            micro = microbatches[microbatch]
            with self.batchnorm.counting(micro.num_samples, stage):
                output = forward(micro._replace(stage=stage, values=values))
            if stage != self.last_stage:
                return StageOutput(output.values)
            # Keep the totals, and let go of the loss with its graph.
            outputs.append(output._replace(loss=output.step_totals))
            return StageOutput(output.values, output.loss)

        # Cached, for it is asked several times for each message.
        key_of = cache(lambda microbatch: self._shape_key(microbatches[microbatch][1:3]))
        comm = StageComm(self.link, self.table, key_of)
        engine = ScheduleExecutor(
            self.table, comm, compute, lambda stage: self.stages[stage].parameters()
        )
        for _ in engine.run():
            pass
        self.batchnorm.commit()
        if batch.is_last_microbatch:
            self.ties.sum_gradients()
        return self._reduce_totals(outputs, batch)

    def _inputs_of(self, batch: LocalBatch) -> tuple[Any, ...]:
        """Return the arguments with which the user's function calls the model."""
        with preserve_rng_state():
            inputs = call_arguments(self.model, batch)
        return apply_pre_hooks(self.model, self.hooks, inputs)

    def evaluate(self, *inputs: Any) -> Any:
        """Return the model's output, without a graph, on every rank of the pipeline.

        Collective over the pipeline.
        """
        self.constants.check_unchanged()
        with torch.no_grad():
            output = self._run_stages(inputs)
            return self._broadcast_output(output)

    def _run_stages(self, inputs: tuple[Any, ...]) -> Any:
        """Send the batch in one piece through all stages. Return the output on the rank of the
        last stage, None on others.
        """
        comm = StageComm(
            self.link,
            _as_single_microbatch(self.table),
            lambda _: ("evaluation", self._shape_key(inputs)),
            backward=False,
        )
        output = None
        for stage, module in self.stages.items():
            action = Action("F", stage, 0)
            message = message_before(self.table, action)
            values = comm.recv_forward(message)[0] if message else []
            output = module(self.model.training, *inputs, *values)
            sent = message_after(self.table, action)
            if sent is not None:
                comm.send_forward(sent, output)
        self.link.flush()
        return output if self.last_stage in self.stages else None

    def _broadcast_output(self, output: Any) -> Any:
        """Return the last stage's output on every rank.

        Its structure, and leaves that are no tensors, travel as JSON; tensors in a broadcast each.
        """
        source = self.table.rank_of(self.last_stage)
        is_source = self.axis.rank == source
        leaves, spec = tree_flatten(output)
        sent = json.dumps([treespec_dumps(spec), _leaf_headers(leaves)]) if is_source else ""
        received = next(text for text in self.axis.all_gather_str(sent) if text)
        spec_text, headers = json.loads(received)
        results = []
        for index, header in enumerate(headers):
            if isinstance(header, dict):
                results.append(header["is"])
                continue
            dtype, shape = header
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.axis.device)
            if is_source:
                # The copy is a plain tensor, even if the model returns sharded logits.
                tensor.copy_(leaves[index])
            dist.broadcast(tensor, group=self.axis.group, group_src=source)
            results.append(tensor)
        return tree_unflatten(results, treespec_loads(spec_text))

    def _shape_key(self, inputs: tuple[Any, ...]) -> Hashable:
        """Return what determines the shapes of all activations."""
        shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(inputs))
        return self.model.training, torch.is_grad_enabled(), shapes

    def _reduce_totals(self, outputs: list[ForwardOutput], batch: LocalBatch) -> StepResult:
        """Return the last stage's totals and all stop requests, on every rank.

        The sum is in float64: (TOTALS_LENGTH + 1,). Other ranks add zeros.
        """
        totals = torch.zeros(TOTALS_LENGTH + 1, dtype=torch.float64, device=self.axis.device)
        for output in outputs:
            totals[:TOTALS_LENGTH] += output.step_totals
            totals[SUM_COUNT_INDEX] = output.is_sum_and_count
        totals[STOP] = batch.stop_requested * batch.grad_weight
        totals = self.axis.all_reduce(totals)
        is_sum_and_count = bool(totals[SUM_COUNT_INDEX])
        sums = totals[:TOTALS_LENGTH].to(self.dtype)
        if batch.previous_totals is not None:
            sums = sums + batch.previous_totals
        return StepResult(sums, is_sum_and_count)


def _leaf_headers(leaves: list[Any]) -> list[Any]:
    """Return [dtype, shape] of a tensor, {"is": value} of any other leaf."""
    return [
        [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
        if isinstance(leaf, Tensor)
        else {"is": leaf}
        for leaf in leaves
    ]


def _as_single_microbatch(table: ScheduleTable) -> ScheduleTable:
    """Return a table of one micro-batch, forward only, with the same stages on the same ranks."""
    rows = tuple(
        tuple(Action("F", stage, 0) for stage in table.stages_of(rank))
        for rank in range(table.num_ranks)
    )
    return ScheduleTable(table.name, rows, table.num_stages, 1)
