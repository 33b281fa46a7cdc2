"""Data parallel: every rank holds the whole model and a share of each batch.

Gradients are averaged over ranks.

      rank 0   forward ── backward ▓▓▓▓▓▓▓▓ ── step
                             └ bucket 1 ┐ └ bucket 2 ┐    a bucket is reduced as soon as its
      rank 1   forward ── backward ▓▓▓▓▓▓▓▓ ── step       gradients are there, while earlier layers
                                                          still compute

      strategy.py            what can be asked, and what is refused
      layout_choice.py       which layout and reduce function a run gets, and why
      gradient_reducer.py    a step, whatever the layout
      single_message.py, overlapped_buckets.py, torch_engine.py    layouts: when gradients travel
      reduce_functions.py    how they become means

Three things hold in every layout:

[1] *Totals travel with the gradients.* Loss sum, count and measures of a step are part of the
    gradients' own messages: the global loss costs no collective and no synchronisation.
[2] *A parameter that no rank has used keeps no gradient.* Messages say which gradients each rank
    had. torch's engine cannot: a first step without it shows what it has to search for.
[3] *Sums have one order.* On the CPU every gradient is summed in the order of ranks (by the
    backend, or by `comm/ordered.py`), so that a resumed run is the undisturbed one to the last bit.
    With `allreduce=` another algorithm's order takes its place (`comm/algorithms`).

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.comm.compression.reducers import parse
from shoal.comm.mesh import Mesh, register_cleanup
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.ddp.layout_choice import build_reducer, is_partial_model, sparse_layers
from shoal.strategies.grad_checks import check_real_parameters
from shoal.strategies.options import DdpOptions

GRADS_AFTER_BACKWARD_MESSAGE = (
    "ddp on several ranks keeps all gradients in its buckets for the whole run, so nothing would "
    "be saved. Use zero1, zero2 or zero3, which free each unit's."
)

AUTO_MESSAGE = "all-reduce: auto, which is the backend's own; no table of measured times is read"

NO_PARAMETERS_MESSAGE = "strategy ddp averages gradients; the model has no trainable parameter."


class Ddp(DdpOptions, Strategy):
    """Distributed data parallel."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace forward, run and late_gradients; with error feedback, kept too. Collective.

        Raises: StrategyRefused: the model has no trainable parameter; compress beside tensor or
            pipeline, or of complex numbers; allreduce beside these, or of sparse gradients.
        """
        if self.allreduce == "auto":
            model = replace(model, summary_lines=(*model.summary_lines, AUTO_MESSAGE))
            return replace(self, allreduce="backend", table="").apply(model, mesh)
        self._check_allreduce(model, mesh)
        self._check_compress(model)
        if not model.trainable_params and not model.is_partial:  # some layers may have none
            raise StrategyRefused(NO_PARAMETERS_MESSAGE)
        if mesh.data.size == 1:
            return model
        mesh.data.broadcast_module(model.module)
        reducer = build_reducer(self, model, mesh.data)
        register_cleanup(reducer)
        return replace(
            model,
            forward=reducer.forward,
            run=reducer.forward_backward,
            grads_not_ready_reason=model.grads_not_ready_reason or GRADS_AFTER_BACKWARD_MESSAGE,
            strategy_state=reducer.reduce.strategy_state,
            summary_lines=(*model.summary_lines, *reducer.reduce.summary_lines),
        )

    @property
    def deviations(self) -> list[str]:
        """Sentences for the startup summary: where the numbers are not those of one device."""
        if self.compress == "none":
            return []
        return [f"compress={self.compress} is not exact: gradients arrive rounded, or late."]

    def _check_allreduce(self, part: LocalModel, mesh: Mesh) -> None:
        """Raise StrategyRefused where the named algorithm cannot average this model's gradients."""
        if self.allreduce == "backend":
            return
        sparse = sparse_layers(part.module)
        if sparse:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves dense gradients, and {', '.join(sparse)} "
                "has sparse=True. Use sparse=False, or leave allreduce out."
            )
        if is_partial_model(part) or parse(self.compress) is not None:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} does not stand beside tensor, pipeline or "
                "compress, whose gradients are averaged in another way. Leave allreduce out."
            )
        if mesh.device.type != "cpu":
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves tensors of the CPU; this run is on "
                f"{mesh.device.type}, where NCCL has algorithms of its own. Leave allreduce out; "
                "NCCL_ALGO=Ring or NCCL_ALGO=Tree chooses one."
            )

    def _check_compress(self, part: LocalModel) -> None:
        """Raise StrategyRefused where this model's gradients cannot be compressed."""
        if parse(self.compress) is None:
            return
        if is_partial_model(part):
            raise StrategyRefused(
                f"compress={self.compress} is for whole models, and beside tensor and pipeline a "
                "rank has a part of one. Use compress=none, or ddp alone."
            )
        check_real_parameters(part.trainable_params, self.compress)
