"""torch's DistributedDataParallel as a layout. The first step decides its settings.

      step 1      without the engine    shows parameters with a gradient, changed buffers;
                                        gradients are averaged after the backward pass, one by one
      step 2 ...  with the engine       buckets are reduced while the backward pass goes on; one of
                                        them has the totals

The engine searches the graph for unused parameters only if a rank did not use one in step 1. The
search costs an additional all-reduce in every step.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.axis import Axis
from shoal.comm.deterministic import (
    register_overlapped_reduce,
    sums_in_order,
    use_ordered_mean,
)
from shoal.errors import StrategyRefused
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.c10d import check_reducer_finalized
from shoal.strategies.base import (
    TOTALS_LENGTH,
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
)
from shoal.strategies.ddp.gradient_reducer import GradientReducer
from shoal.strategies.ddp.reduce_functions import NamedMean, ReduceFunction
from shoal.strategies.grad_checks import accumulated_twice_error
from shoal.strategies.module_snapshot import changed_since, snapshot
from shoal.strategies.options import DdpOptions


class TorchEngine(GradientReducer):
    """Averages the first step's gradients itself, and all others with DistributedDataParallel."""

    def __init__(
        self,
        model: LocalModel,
        axis: Axis,
        options: DdpOptions,
        reduce: ReduceFunction,
    ) -> None:
        super().__init__(model, reduce, axis.size)
        self._axis = axis
        self._options = options
        self._carrier = TotalsCarrier(model, axis.device)
        self._buffers_before = snapshot(model.module)
        self._accumulated: set[str] | None = None  # None outside of passes: hooks do nothing
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_accumulate, name))
            for name, parameter in model.trainable_params.items()
        ]
        self._ddp: DistributedDataParallel | None = None
        self._errors: list[Exception] = []

    @property
    def forward(self) -> Forward:
        return self._through_engine

    def start_step(self) -> None:
        self._carrier.parameter.grad = None

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        sync = (
            nullcontext() if batch.is_last_microbatch or self._ddp is None else self._ddp.no_sync()
        )
        self._accumulated = set()
        try:
            with sync:
                return self.model.run(forward, batch)
        finally:
            self._accumulated = None

    def _on_accumulate(self, name: str, _: Tensor) -> None:
        if self._accumulated is None:
            return
        if name in self._accumulated:
            raise accumulated_twice_error(name)
        self._accumulated.add(name)

    def finish_step(self, totals: Tensor) -> Tensor:
        if self._errors:
            raise self._errors[0]
        if self._ddp is None:
            self._ddp = self._finish_first_step()
        else:
            self._check_all_reduced(self._ddp)
        reduced = self._carrier.parameter.grad
        assert reduced is not None
        return reduced.clone()  # it is a view of a bucket, which the next step overwrites

    def close(self) -> None:
        for hook in self._hooks:  # what comes next finds the parameters without them
            hook.remove()
        self._ddp = None
        super().close()

    def _through_engine(self, batch: LocalBatch) -> ForwardOutput:
        """Compute a micro-batch through the engine, which prepares for its backward pass."""
        output: ForwardOutput = (self._ddp or self._carrier)(batch)
        return output

    def _finish_first_step(self) -> DistributedDataParallel:
        """Average the first step's gradients, and build the engine for what it used. Collective."""
        gradients = {name: p.grad for name, p in self.model.trainable_params.items()}
        self.model.finite_check.look(gradients)
        parameters = [p for p in self._carrier.parameters() if p.requires_grad]
        used = [parameter.grad is not None for parameter in parameters]
        changes_buffers = any(changed_since(self.model.module, self._buffers_before).values())
        *ranks_using, ranks_changing = self._axis.sum_of_host_numbers([*used, changes_buffers])
        for parameter, num_ranks in zip(parameters, ranks_using, strict=True):
            if num_ranks:
                self._average(parameter)
        all_used = all(num_ranks == self._axis.size for num_ranks in ranks_using)
        find_unused = self._options.unused or not all_used
        ddp = self._build(find_unused, sync_buffers=ranks_changing > 0)
        self._carrier.engine_searches = find_unused
        self._register_hook(ddp)
        return ddp

    def _register_hook(self, ddp: DistributedDataParallel) -> None:
        """Let the engine average its buckets by our function. Collective over the world."""
        on_cpu = self._axis.device.type == "cpu"
        if isinstance(self.reduce, NamedMean):
            register_overlapped_reduce(ddp, self.reduce.mean, self._errors, self._look_at)
        elif self.reduce.blocks or (on_cpu and sums_in_order(ddp.process_group)):
            # Elsewhere the engine's own all-reduce gives the same values. In shared memory a hook
            # costs no more than that, and looks for NaN too.
            use_ordered_mean(ddp, self._axis, self._errors, self._look_at)

    def _look_at(self, bucket: Tensor) -> None:
        """Look for gradients of this rank that are not finite, before they are sent."""
        self.model.finite_check.look({"": bucket})  # whose gradients it has, the engine knows

    def _average(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse and self.reduce.blocks:
            raise StrategyRefused(
                "a gradient is sparse, and none of the model's embeddings has sparse=True, so it "
                "was not expected. Use nn.Embedding(..., sparse=True), or a dense gradient."
            )
        self.reduce.mean(parameter.grad)

    def _build(self, find_unused: bool, sync_buffers: bool) -> DistributedDataParallel:
        signature = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 renamed the argument and warns about the old name.
        has_new_name = "forward_sync_buffers" in signature
        buffers = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
        arguments: dict[str, Any] = {buffers: sync_buffers}
        return DistributedDataParallel(
            self._carrier,
            process_group=self._axis.group,
            init_sync=False,  # `Ddp.apply` has broadcast the module
            bucket_cap_mb=self._options.bucket_mb,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
            **arguments,
        )

    def _check_all_reduced(self, ddp: DistributedDataParallel) -> None:
        """Raise StrategyRefused if a bucket was not reduced because it lacks a gradient.

        Called before the step, which would use gradients of this rank alone.
        """
        try:
            check_reducer_finalized(ddp)
        except RuntimeError as error:
            named = self._carrier.named_parameters()
            names = [name.removeprefix("module.") for name, p in named if p.requires_grad]
            # torch's message has their indices.
            groups = re.findall(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            lacking = [names[int(index)] for group in groups for index in group.split()]
            missing = ", ".join(lacking) or "some parameters"
            raise StrategyRefused(
                f"{missing}: no gradient in this step, though there was one in the first. Which "
                "parameters are used changes from step to step; use --strategy ddp,unused=true."
            ) from error


class TotalsCarrier(nn.Module):
    """The local model's module, with a parameter whose gradient is the totals of the step.

    Attributes:
        parameter: (TOTALS_LENGTH,), the first parameter's real dtype, float32 at least.
        engine_searches: the engine searches the autograd graph for unused parameters.
    """

    def __init__(self, model: LocalModel, device: torch.device) -> None:
        super().__init__()
        self.module = model.module
        self.engine_searches = False
        self._model_forward = model.forward
        first = next(iter(model.trainable_params.values()))
        dtype = accumulation_dtype(first.dtype).to_real()
        self.parameter = nn.Parameter(torch.zeros(TOTALS_LENGTH, dtype=dtype, device=device))

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        output = self._model_forward(batch)
        if not batch.is_last_microbatch:
            return output
        # The engine's search for unused parameters follows nodes of the graph, and a leaf has
        # none: a view has.
        carrier = self.parameter.view(TOTALS_LENGTH) if self.engine_searches else self.parameter
        return output._replace(
            step_totals=output.step_totals.to(carrier.dtype), totals_param=carrier
        )
