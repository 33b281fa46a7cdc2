"""torch's DistributedDataParallel as a layout, built for what the first step shows.

      step 1      without the engine    which parameters get a gradient? do buffers change?
                                        gradients are averaged after the backward pass, one by one
      from 2 on   through the engine    buckets are reduced while the backward pass goes on; totals
                                        travel in one of them

Only a model with a parameter that some rank does not use pays for the engine's search of the
graph, which is an all-reduce more in every step.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.c10d import check_reducer_finalized
from shoal.strategies.base import Forward, ForwardOutput, LocalBatch, LocalModel, StepResult
from shoal.strategies.ddp.first_step_probe import FirstStepProbe
from shoal.strategies.ddp.gradient_reducer import GradientLayout
from shoal.strategies.ddp.reduce_functions import ReduceFunction
from shoal.strategies.ddp.totals_carrier import TotalsCarrier
from shoal.strategies.grad_checks import AccumulatedOnceCheck
from shoal.strategies.options import DdpOptions


class TorchEngine(GradientLayout):
    """Takes the first step by hand, and all others through a DistributedDataParallel."""

    def __init__(
        self,
        part: LocalModel,
        axis: Axis,
        options: DdpOptions,
        reduce: ReduceFunction,
    ) -> None:
        super().__init__(part)
        self._axis = axis
        self._options = options
        self._reduce = reduce
        self._carrier = TotalsCarrier(part, axis.device)
        self._probe = FirstStepProbe(self._carrier, part.module)
        self._check = AccumulatedOnceCheck(part.trainable_params)
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
        with self._check.during(), sync:
            return self.part.run(forward, batch)

    def finish_step(self, totals: Tensor) -> Tensor:
        if self._errors:
            raise self._errors[0]
        if self._ddp is None:
            self._ddp = self._finish_first_step()
        else:
            self._check_all_reduced(self._ddp)
        return self._carrier.reduced_totals()

    def close(self) -> None:
        self._ddp = None

    def _through_engine(self, batch: LocalBatch) -> ForwardOutput:
        """Run a micro-batch through the engine, so that it knows which gradients to wait for."""
        outcome: ForwardOutput = (self._ddp or self._carrier)(batch)
        return outcome

    def _finish_first_step(self) -> DistributedDataParallel:
        """Average the first step's gradients, and build the engine by its probe. Collective."""
        used, changes_buffers = self._probe.result()
        flags = torch.tensor([*used, changes_buffers], dtype=torch.int64, device=self._axis.device)
        *ranks_using, ranks_changing = self._axis.all_reduce(flags).tolist()
        for parameter, num_ranks in zip(self._probe.parameters, ranks_using, strict=True):
            if num_ranks:
                self._average(parameter)
        always = all(num_ranks == self._axis.size for num_ranks in ranks_using)
        find_unused = self._options.unused or not always
        ddp = self._build(find_unused, sync_buffers=ranks_changing > 0)
        self._carrier.engine_searches = find_unused
        self._reduce.register_hook(ddp, self._errors)
        return ddp

    def _average(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse and self._reduce.blocks:
            raise StrategyRefused(
                "a gradient is sparse, and none of the model's embeddings has sparse=True, so it "
                "was not expected. Use nn.Embedding(..., sparse=True), or a dense gradient."
            )
        self._reduce.mean(parameter.grad)

    def _build(self, find_unused: bool, sync_buffers: bool) -> DistributedDataParallel:
        signature = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 renamed the argument and warns about the old name.
        has_new_name = "forward_sync_buffers" in signature
        buffers = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
        arguments: dict[str, Any] = {buffers: sync_buffers}
        return DistributedDataParallel(
            self._carrier,
            process_group=self._axis.group,
            init_sync=False,  # `Ddp.cut` has made all ranks equal
            bucket_cap_mb=self._options.bucket_mb,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
            **arguments,
        )

    def _check_all_reduced(self, ddp: DistributedDataParallel) -> None:
        """Raise before the step is taken if a bucket was not reduced for want of a gradient."""
        try:
            check_reducer_finalized(ddp)
        except RuntimeError as error:
            missing = ", ".join(self._missing_names(str(error))) or "some parameters"
            raise StrategyRefused(
                f"{missing}: no gradient in this step, though there was one in the first. Which "
                "parameters are used changes from step to step; use --strategy ddp,unused=true."
            ) from error

    def _missing_names(self, text: str) -> list[str]:
        """Return the names of the parameters whose numbers stand in torch's message."""
        names = [name for name, p in self._carrier.named_parameters() if p.requires_grad]
        groups = re.findall(r"did not receive grad for rank \d+: ([\d ]+)", text)
        return [names[int(i)].removeprefix("module.") for group in groups for i in group.split()]
