"""Data parallel: every rank holds the whole model and a share of each batch; gradients are averaged.

      rank 0   forward ── backward ▓▓▓▓▓▓▓▓ ── step
                             └ bucket 1 ┐ └ bucket 2 ┐        a bucket is reduced as soon as its gradients
      rank 1   forward ── backward ▓▓▓▓▓▓▓▓ ── step           are there, while earlier layers still compute

The engine is PyTorch's DistributedDataParallel (Li et al., VLDB 2020). Three things are added to it:

[1] *Totals ride along.* Loss sum, count and measures of a step are the gradient of one small extra parameter, so the
    gradients' own all-reduce sums them over all ranks: the global loss costs no collective and no synchronisation.
[2] *The first step looks.* It is taken without the engine, to see which parameters get no gradient and which buffers
    the forward pass changes; the engine is then built for that. Only a model with such a parameter pays for the search
    in every step, which is an all-reduce more.
[3] *Sums have one order.* On the CPU every gradient is summed in the order of ranks (by the backend, or by
    `comm/ordered.py`), so that a resumed run is the undisturbed one to the last bit. With `allreduce=` another
    algorithm's order takes its place (`comm/algorithms`).

Gradients of up to 4 MiB do without the engine on the CPU, and without what it costs in every step (`one_message.py`).

The engine takes no sliced parameters, one backward pass a micro-batch, and its buckets are not the same after a resume:
beside tensor, in a pipeline, where gradients are sent in fewer bytes, and where sparse ones are to be summed in order,
they are averaged by `averaged.py`.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.algorithms.all_reduce import NamedAllReduce
from shoal.comm.axis import Axis
from shoal.comm.beside import reduce_beside
from shoal.comm.fewer import parse
from shoal.comm.mesh import Mesh, close_before_leaving
from shoal.comm.ordered import mean, needs_order, use_ordered_mean
from shoal.errors import StrategyRefused
from shoal.strategies.averaged import Averaged
from shoal.strategies.base import SLOTS, Batch, Forward, Loss, Outcome, Part
from shoal.strategies.buffers import changed, held
from shoal.strategies.complex_numbers import refuse_complex
from shoal.strategies.one_message import OneMessage, fits
from shoal.strategies.options import DdpOptions
from shoal.strategies.whole_gradients import WholeGradients

LATE = (
    "ddp on several ranks keeps all gradients in its buckets for the whole run, so nothing would be saved. Use zero1, "
    "zero2 or zero3, which free each unit's."
)

AUTO = "all-reduce: auto, which is the backend's own; no table of measured times is read"


class Ddp(DdpOptions):
    """Distributed data parallel."""

    def cut(self, part: Part, mesh: Mesh) -> Part:
        """Replaces run and late_gradients, and forward where buckets are sent beside the backward pass. Collective.

        Raises: StrategyRefused: the model has no trainable parameter; compress beside tensor or pipeline, or of complex
            numbers; allreduce beside these, or of sparse gradients.
        """
        if self.allreduce == "auto":
            part = replace(part, said=(*part.said, AUTO))
            return replace(self, allreduce="backend", table="").cut(part, mesh)
        reduction = parse(self.compress)
        sliced = any(isinstance(parameter, DTensor) for parameter in part.owned.values())
        ours, sparse = part.many_passes or sliced, _sparse(part.module)
        self._refuse_algorithm(mesh, alone=not ours and reduction is None, sparse=sparse)
        if reduction is not None and ours:
            raise StrategyRefused(
                f"compress={self.compress} is for whole models, and beside tensor and pipeline a rank has a part of "
                "one. Use compress=none, or ddp alone."
            )
        if reduction is not None:
            refuse_complex(part.owned, self.compress)
        if not part.owned and not part.many_passes:  # a stage may have none
            raise StrategyRefused("strategy ddp averages gradients; the model has no trainable parameter.")
        if mesh.data.size == 1:
            return part
        mesh.data.broadcast(part.module)
        if reduction is not None:
            return self._compressed(part, Averaged(part, mesh.data, self.bucket_mb, reduction), reduction.keeps_error)
        if ours or (sparse and needs_order(mesh.data)):
            return self._averaged(part, Averaged(part, mesh.data, self.bucket_mb))
        late = part.late_gradients or LATE
        if self.allreduce == "backend" and not sparse and fits(part, mesh.data, self.bucket_mb):
            return replace(part, run=OneMessage(part, mesh.data).run, late_gradients=late)
        engine = _Engine(self, part, mesh.data)
        close_before_leaving(engine)
        said = (*part.said, *engine.said)
        return replace(part, forward=engine.forward, run=engine.run, late_gradients=late, said=said)

    def _averaged(self, part: Part, engine: Averaged) -> Part:
        close_before_leaving(engine)
        return replace(part, run=engine.run, late_gradients=part.late_gradients or LATE)

    def _refuse_algorithm(self, mesh: Mesh, alone: bool, sparse: list[str]) -> None:
        if self.allreduce == "backend":
            return
        if sparse:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves dense gradients, and {', '.join(sparse)} has sparse=True. Use "
                "sparse=False, or leave allreduce out."
            )
        if not alone:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} does not stand beside tensor, pipeline or compress, whose gradients "
                "are averaged in another way. Leave allreduce out."
            )
        if mesh.device.type != "cpu":
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves tensors of the CPU; this run is on {mesh.device.type}, where "
                "NCCL has algorithms of its own. Leave allreduce out; NCCL_ALGO=Ring or NCCL_ALGO=Tree chooses one."
            )

    @property
    def notes(self) -> list[str]:
        """Why the numbers are not those of one device, where they are not."""
        if self.compress == "none":
            return []
        return [f"compress={self.compress} is not exact: gradients arrive rounded, or late."]

    def _compressed(self, part: Part, engine: Averaged, keeps_error: bool) -> Part:
        close_before_leaving(engine)
        sent, plain = (figure / 1e6 for figure in engine.bytes_a_step())
        said = (
            f"compress={self.compress}: a rank sends {sent:,.3g} MB of gradients a step; uncompressed {plain:,.3g} MB"
        )
        return replace(
            part,
            run=engine.run,
            late_gradients=LATE,
            kept=engine if keeps_error else None,
            said=(*part.said, said),
        )


class _Engine:
    """Takes the first step by hand, looking, and all others through a DistributedDataParallel built for what it saw."""

    def __init__(self, options: Ddp, part: Part, data: Axis) -> None:
        self.options, self.part, self.data = options, part, data
        self.riding = _Riding(part, data.device)
        self.look, self.whole_gradients = _Look(self.riding), WholeGradients(part.owned)
        self.ddp: DistributedDataParallel | None = None
        self.failures: list[Exception] = []
        self.named = None if options.allreduce == "backend" else NamedAllReduce(options.allreduce, data)
        self.said = () if self.named is None else self.named.said()

    def forward(self, batch: Batch) -> Outcome:
        """Through the engine, so that it knows which gradients to wait for."""
        outcome: Outcome = (self.ddp or self.riding)(batch)
        return outcome

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """One micro-batch; gradients and totals are reduced with the last one of the step."""
        # Gradients become means over ranks; the objectives of all ranks are to be summed.
        batch = batch._replace(scale=batch.scale * self.data.size)
        self.riding.carrier.grad = None
        sync = nullcontext() if batch.last or self.ddp is None else self.ddp.no_sync()
        with self.whole_gradients.during(), sync:
            local = self.part.run(forward, batch)
        if not batch.last:
            return local
        if self.failures:
            raise self.failures[0]
        if self.ddp is None:
            self.ddp = self._after_the_first()
        else:
            self._check_reduced(self.ddp)
        return Loss(self.riding.carried(), local.weighed)

    def close(self) -> None:
        """Let go of the process group, which the engine holds."""
        self.ddp = None
        if self.named is not None:
            self.named.close()

    def _after_the_first(self) -> DistributedDataParallel:
        """[2] Reduce what the first step has left, and build the engine for what was seen. Collective."""
        used, changes_buffers = self.look.result()
        flags = torch.tensor([*used, changes_buffers], dtype=torch.int64, device=self.data.device)
        *users, changes = self.data.sum(flags).tolist()
        for parameter, count in zip(self.look.parameters, users, strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._mean(parameter.grad)
        always = all(count == self.data.size for count in users)
        return self._build(find_unused=self.options.unused or not always, sync_buffers=changes > 0)

    def _mean(self, gradient: Tensor) -> None:
        if gradient.is_sparse and (self.named is not None or needs_order(self.data)):
            raise StrategyRefused(
                "a gradient is sparse, and none of the model's embeddings has sparse=True, so it was not expected. Use "
                "nn.Embedding(..., sparse=True), or a dense gradient."
            )
        if self.named is not None:
            self.named.mean(gradient)
        else:
            mean(gradient, self.data)

    def _build(self, find_unused: bool, sync_buffers: bool) -> DistributedDataParallel:
        signature = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 renamed the argument and warns about the old name.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature else "broadcast_buffers"
        arguments: dict[str, Any] = {buffers: sync_buffers}
        ddp = DistributedDataParallel(
            self.riding,
            process_group=self.data.group,
            init_sync=False,  # `cut` has made all ranks equal
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
            **arguments,
        )
        self.riding.searched = find_unused
        if self.named is not None:
            reduce_beside(ddp, self.named.mean, self.failures)
        elif needs_order(self.data):
            use_ordered_mean(ddp, self.data, self.failures)
        return ddp

    def _check_reduced(self, ddp: DistributedDataParallel) -> None:
        """Raise now, before a step is taken, when a gradient did not arrive and its bucket was never reduced."""
        try:
            ddp._check_reducer_finalized()
        except RuntimeError as error:
            names = [name for name, p in self.riding.named_parameters() if p.requires_grad]
            missing = re.findall(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            found = [names[int(i)].removeprefix("module.") for group in missing for i in group.split()]
            listed = ", ".join(found) if found else "some parameters"
            raise StrategyRefused(
                f"{listed}: no gradient in this step, though there was one in the first. Which parameters are used "
                "changes from step to step; use --strategy ddp,unused=true."
            ) from error


class _Look:
    """[2] Sees which parameters get a gradient in the first step, and whether its forward pass changes buffers."""

    def __init__(self, riding: _Riding) -> None:
        self.parameters = [p for p in riding.parameters() if p.requires_grad]
        self.module, self.before = riding.module, held(riding.module)
        self.used = [0] * len(self.parameters)
        self.hooks = [p.register_hook(partial(self._saw, index)) for index, p in enumerate(self.parameters)]

    def _saw(self, index: int, _: Tensor) -> None:
        self.used[index] = 1

    def result(self) -> tuple[list[int], int]:
        """For each parameter whether it was used, and whether a buffer changed; the looking ends."""
        for hook in self.hooks:
            hook.remove()
        return self.used, int(any(changed(self.module, self.before).values()))


class _Riding(nn.Module):
    """[1] The part's module with one parameter more, whose gradient is the totals of the step."""

    def __init__(self, part: Part, device: torch.device) -> None:
        super().__init__()
        self.module = part.module
        self.part_forward, self.searched = part.forward, False
        dtype = torch.promote_types(next(iter(part.owned.values())).dtype, torch.float32).to_real()
        self.carrier = nn.Parameter(torch.zeros(SLOTS, dtype=dtype, device=device))

    def carried(self) -> Tensor:
        """Totals over all ranks, after the backward pass."""
        assert self.carrier.grad is not None
        return self.carrier.grad.clone()  # it lies in a bucket, which the next step overwrites

    def forward(self, batch: Batch) -> Outcome:
        outcome = self.part_forward(batch)
        if not batch.last:
            return outcome
        # Where the engine searches the graph for what is used, it finds operations only, not leaves.
        carrier = self.carrier.view(SLOTS) if self.searched else self.carrier
        return outcome._replace(totals=outcome.totals.to(carrier.dtype), carrier=carrier)


def _sparse(module: nn.Module) -> list[str]:
    """Names of the layers whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [n for n, m in module.named_modules() if isinstance(m, kinds) and m.sparse and m.weight.requires_grad]
