"""The stages of one rank in use: a training step through the pipeline, and an evaluation.

A call of a divided model outside of a step is an evaluation too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis, new_group
from shoal.comm.norm import to_local
from shoal.costs.pass_table import Action
from shoal.data.seeds import derive_seed
from shoal.data.tree_map import SPARSE
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.module_state import replace_call
from shoal.platform.torch_private.pytree import (
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from shoal.strategies.base import (
    STOP,
    TOTALS_LENGTH,
    Extra,
    Forward,
    ForwardOutput,
    LocalBatch,
    StepResult,
)
from shoal.strategies.local_step import split_microbatches, weighted_loss
from shoal.strategies.loss_terms import Summed
from shoal.strategies.pipeline.absent import refusals_as_errors
from shoal.strategies.pipeline.division import (
    DividedModel,
    StageCall,
    StageModule,
    code_key,
    shape_key,
)
from shoal.strategies.pipeline.engine import (
    ScheduleExecutor,
    StageOutput,
    is_reached_by_others,
)
from shoal.strategies.pipeline.p2p import P2PLink, StageComm
from shoal.strategies.pipeline.schedules import ScheduleTable
from shoal.strategies.pipeline.units import Crossing, draw_seed, host_draws_refused
from shoal.trace.recorder import Recorder


class PipelineExecutor:
    """One rank of a pipeline.

    Args:
        divided: the user's model; only the modules of this rank have memory.
        home: the modules of this rank.
        axis: the pipeline axis.
        ties: sums the gradients of tied parameters.
        recorder: records passes and messages in a trace.
    """

    def __init__(
        self,
        divided: DividedModel,
        home: StageModule,
        axis: Axis,
        ties: Ties,
        recorder: Recorder,
    ) -> None:
        self.divided = divided
        self.home = home
        self.table = divided.table
        self.axis = axis
        self.ties = ties
        # Messages to lower ranks have a group of their own on GPUs: [5] of `p2p.py`.
        downward = new_group(axis.all_groups) if axis.device.type == "cuda" else None
        self.link = P2PLink(axis, recorder, downward)
        self.model = divided.units.model
        self.last_stage = divided.stage_map.last
        floating = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        self.dtype = accumulation_dtype(floating[0] if floating else torch.float32)
        self._planned: tuple[StageCall, Crossing] | None = None

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Run stage `batch.stage` on a micro-batch; the last stage computes the loss too."""
        assert self._planned is not None, "`run` plans each micro-batch"
        values, result = self._run_stage(batch.stage, *self._planned, batch.values)
        if batch.stage == self.last_stage:
            return weighted_loss(result, batch)
        zero = torch.zeros((), device=self.axis.device)
        return ForwardOutput(zero, zero, False, values=values)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Send all micro-batches through all stages; gradients add up in `.grad`.

        Collective over the pipeline.

        Args:
            forward: `self.forward`, or a function that other strategies have put around it.
        """
        count = self.table.num_microbatches
        # Every rank runs as many micro-batches as the table has. Where samples are fewer, stand-ins
        # of zero samples fill up.
        single = batch._replace(previous_totals=None, stop_requested=False)
        microbatches = list(split_microbatches(single, count, min_count=count))
        seed = self._common_seed()
        calls = [
            StageCall.of(self.model, micro, derive_seed(seed, index) % 2**31)
            for index, micro in enumerate(microbatches)
        ]
        crossings = self.divided.plan(calls, self.axis)
        outputs: list[ForwardOutput] = []

        def compute(stage: int, microbatch: int, values: tuple[Tensor, ...]) -> StageOutput:
            micro = microbatches[microbatch]
            self._planned = calls[microbatch], crossings[microbatch]
            output = forward(micro._replace(stage=stage, values=values))
            if stage != self.last_stage:
                return StageOutput(output.values)
            # Keep the totals, and let go of the loss with its graph.
            outputs.append(output._replace(loss=output.step_totals))
            return StageOutput(output.values, output.loss)

        comm = StageComm(self.link, self.table, lambda microbatch: calls[microbatch].key)
        engine = ScheduleExecutor(comm, compute, self.divided.parameters)
        # Checkpoints in the user's code call units again in a backward pass.
        with self.divided.units.watched(), refusals_as_errors(), host_draws_refused():
            for _ in engine.run():
                pass
        self._planned = None
        if batch.is_last_microbatch:
            self.ties.sum_gradients()
        return self._reduce_totals(outputs, batch)

    def evaluate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of the batch returns, without a graph, on every rank.

        Collective over the pipeline: all ranks call it with the same arguments.
        """
        result: Any = None

        def compute(stage: int, _: int, values: tuple[Tensor, ...]) -> StageOutput:
            nonlocal result
            values, found = self._run_stage(stage, call, crossing, values)
            if stage == self.last_stage:
                result = found
            self._check_constants(stage, values)
            return StageOutput(values)

        with torch.no_grad():
            call = StageCall(
                partial(function, *args, **kwargs),
                ("evaluation", code_key(function), shape_key(self.model, (args, kwargs))),
                self._common_seed(),
            )
            [crossing] = self.divided.plan([call], self.axis)
            # The batch goes through all stages in one piece.
            comm = StageComm(self.link, _as_single_microbatch(self.table), lambda _: call.key)
            with refusals_as_errors(), host_draws_refused():
                for _ in ScheduleExecutor(comm, compute, self.divided.parameters).run():
                    pass
            return broadcast_nest(self.axis, result, self.table.rank_of(self.last_stage))

    def _run_stage(
        self, stage: int, call: StageCall, crossing: Crossing, values: Sequence[Tensor]
    ) -> Any:
        return self.home(partial(self.divided.run_stage, stage, call, crossing, values))

    def _common_seed(self) -> int:
        """Begin a step: return a seed that is the same on all ranks of the pipeline. Collective.

        Code around the blocks must draw the same numbers on all of them, and a script may have
        drawn on one rank alone.
        """
        seed = torch.tensor([draw_seed()], device=self.axis.host_device)
        self.axis.broadcast_tensor(seed)
        return int(seed)

    def _check_constants(self, stage: int, values: Sequence[Tensor]) -> None:
        """Raise StrategyRefused if what an earlier stage sends without a graph depends on a tensor
        that is to be differentiated: rows that `run.gather` has returned.
        """
        if any(is_reached_by_others(value, self.divided.units.parameters) for value in values):
            raise StrategyRefused(
                f"pipeline: blocks of stage {stage}, or what later stages get of it, use rows that "
                "run.gather has returned. Only the last stage can. Put these blocks into it with "
                "cuts=NAME, or use zero3 with accumulate."
            )

    def _reduce_totals(self, outputs: list[ForwardOutput], batch: LocalBatch) -> StepResult:
        """Return the last stage's totals and extras and all stop requests, on every rank.

        The sum is in float64. Other ranks add zeros. The flags, which the host needs at once, are
        summed on the CPU.
        """
        totals = torch.zeros(TOTALS_LENGTH, dtype=torch.float64, device=self.axis.device)
        extras = tuple(output.extra for output in outputs if output.extra is not None)
        for output in outputs:
            totals += output.step_totals
        is_sum = any(output.is_sum_and_count for output in outputs)
        totals[STOP] = batch.stop_requested * batch.grad_weight
        flags = self.axis.sum_of_host_numbers([is_sum, bool(extras)])
        is_sum_and_count, has_extras = map(bool, flags)
        sums = self.axis.all_reduce(totals).to(self.dtype)
        if batch.previous_totals is not None:
            sums = sums + batch.previous_totals
        if has_extras:
            rank = self.table.rank_of(self.last_stage)
            everywhere = broadcast_nest(self.axis, [*map(tuple, extras)], rank)
            extras = tuple(Extra(*extra) for extra in everywhere)
        return StepResult(sums, is_sum_and_count, extras)


def _as_single_microbatch(table: ScheduleTable) -> ScheduleTable:
    """Return a table of one micro-batch, forward only, with the same stages on the same ranks."""
    rows = tuple(
        tuple(Action("F", stage, 0) for stage in table.stages_of(rank))
        for rank in range(table.num_ranks)
    )
    return ScheduleTable(rows, table.name, table.num_stages, 1)


def broadcast_nest(axis: Axis, nest: Any, source: int) -> Any:
    """Return the nest of rank `source` on every rank. Collective.

    Raises: UsageError: on that rank, if a leaf is neither a tensor nor a JSON value.
    """
    is_source = axis.rank == source
    marked, spec = tree_flatten(nest)
    summed = [isinstance(leaf, Summed) for leaf in marked]
    leaves = [leaf.value if isinstance(leaf, Summed) else leaf for leaf in marked]
    sent = _dumped([treespec_dumps(spec), summed, [*map(_header, leaves)]]) if is_source else ""
    received = next(text for text in axis.all_gather_str(sent) if text)
    spec_text, summed, headers = json.loads(received)
    results: list[Any] = []
    for index, header in enumerate(headers):
        if "is" in header:
            results.append(header["is"])
            continue
        dtype = getattr(torch, header["dtype"])
        tensor = torch.empty(header["shape"], dtype=dtype, device=axis.device)
        if is_source:
            # The copy is a plain tensor, even if the model returns sharded logits.
            value = leaves[index]
            tensor.copy_(value.to_dense() if value.layout in SPARSE else value)
        dist.broadcast(tensor, group=axis.group, group_src=source)
        layout = getattr(torch, header["layout"])
        tensor = tensor.to_sparse(layout=layout) if layout in SPARSE else tensor
        results.append(Summed(tensor) if summed[index] else tensor)
    return tree_unflatten(results, treespec_loads(spec_text))


def _header(leaf: Any) -> dict[str, Any]:
    """Return dtype, layout and shape of a tensor, or the value of any other leaf."""
    if not isinstance(leaf, Tensor):
        return {"is": leaf}
    dtype, layout = (str(kind).removeprefix("torch.") for kind in (leaf.dtype, leaf.layout))
    return {"dtype": dtype, "layout": layout, "shape": [*leaf.shape]}


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise UsageError(
            f"pipeline: what the function returns beside tensors must be numbers and texts, for "
            f"all ranks to get it: {error}."
        ) from error


class RoutedForward:
    """A model's forward function that goes through all stages.

    A copy of the model gets one that refuses: this one would call the original.

    Args: forward: of the model.
    """

    def __init__(self, forward: Callable[..., Any], executor: PipelineExecutor) -> None:
        self._forward = forward
        self._executor = executor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function. Collective over the pipeline outside of steps."""
        if self._executor.divided.units.is_watching:
            return self._forward(*args, **kwargs)
        return self._executor.evaluate(self._forward, *args, **kwargs)

    def __reduce__(self) -> tuple[type[CopiedForward], tuple[()]]:
        return CopiedForward, ()


class CopiedForward:
    """The forward function of a copy, which has the layers of one rank alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "pipeline: this is a copy of a model of which the values of some layers are on another "
            "rank. Copy the model before the first step, and load run.weights() into the copy, on "
            "all ranks."
        )


def route_calls(model: nn.Module, executor: PipelineExecutor) -> None:
    """Let a call of the model outside of a step go through all stages.

    A model that the script has compiled runs as it is written from now on.
    """
    replace_call(model, None)
    vars(model)["forward"] = RoutedForward(model.forward, executor)


class Ties:
    """Sums the gradients of tied parameters over their ranks, such as embedding and head of a GPT.

          rank 0   token_embedding.weight    gradient a   ──a──>                        a + b
          rank 3   head.weight, the same     gradient b            a + b  <──────       a + b

    Each rank steps its copy with the same gradient, so the copies stay equal. Without the sum the
    copies would drift apart, and no error would show it.

    Args:
        axis: the pipeline axis.
        shared: name in the full model -> ranks that hold the parameter, ascending, at least two.
            The same on all ranks, also in its order.
        module: the local module.
        aliases: name in `module` -> name in the full model, where they differ.
    """

    def __init__(
        self,
        axis: Axis,
        shared: Mapping[str, Sequence[int]],
        module: nn.Module,
        aliases: Mapping[str, str],
    ) -> None:
        self.axis = axis
        self.module = module
        self._shared = shared
        self._local_names = {aliases.get(name, name): name for name, _ in module.named_parameters()}

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over all ranks that hold the parameter.

        The first rank adds the gradients in the order of ranks. A parameter without a gradient on
        any rank gets none: with zeros, momentum and weight decay would still change it.
        Collective over the pipeline.
        """
        if not self._shared:
            return
        parameters = dict(self.module.named_parameters())
        local = {
            name: parameters[self._local_names[name]]
            for name, ranks in self._shared.items()
            if self.axis.rank in ranks
        }
        flags = [name in local and local[name].grad is not None for name in self._shared]
        counts = self.axis.sum_of_host_numbers(flags)
        for (name, ranks), count in zip(self._shared.items(), counts, strict=True):
            if name not in local or not count:
                continue
            parameter = local[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = to_local(parameter.grad)
            gradient.copy_(self._sum_over_ranks(gradient.contiguous(), ranks))

    def _sum_over_ranks(self, gradient: Tensor, ranks: Sequence[int]) -> Tensor:
        """Return the sum on each of `ranks`; each of them must call."""
        first, *others = ranks
        group = self.axis.group
        if self.axis.rank != first:
            dist.send(gradient, group=group, group_dst=first)
            dist.recv(gradient, group=group, group_src=first)
            return gradient
        for other in others:
            received = torch.empty_like(gradient)
            dist.recv(received, group=group, group_src=other)
            gradient = gradient + received
        for other in others:
            dist.send(gradient, group=group, group_dst=other)
        return gradient
