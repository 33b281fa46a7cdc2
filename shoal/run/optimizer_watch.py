"""Hooks around the steps of prepared optimizers: new values reach all ranks after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.run.guards.absent_values import removed_gradients
from shoal.run.local_shard_step import step_local_shards
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.strategies.base import LocalModel
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


class OptimizerWatch:
    """Watches the steps of optimizers, each from its first call of `watch` on.

    Args: has_stand_ins: `.grad` holds stand-ins where gradients are elsewhere.
    """

    def __init__(self, mesh: Mesh, nonfinite_steps: NonfiniteSteps, has_stand_ins: bool) -> None:
        self._seen: WeakSet[Optimizer] = WeakSet()  # an id may be that of a later one
        self._mesh = mesh
        self._nonfinite_steps = nonfinite_steps
        self._has_stand_ins = has_stand_ins
        self._local_model: LocalModel | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._shown: WeakKeyDictionary[Optimizer, list[list[Tensor]]] = WeakKeyDictionary()

    def watch(self, local_model: LocalModel, optimizers: Sequence[Optimizer]) -> None:
        """Watch the steps of these optimizers, which step this local model from now on."""
        self._local_model, self._optimizers = local_model, optimizers
        own_progress().set_stage(self._mesh.pipeline.rank)
        self._nonfinite_steps.watch(local_model)
        if local_model.remote_optimizer is not None and self._has_stand_ins:
            parameters = local_model.trainable_params
            local_model.remote_optimizer.removed = partial(removed_gradients, parameters)
        for optimizer in optimizers:
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                if local_model.has_sharded_params:
                    step_local_shards(optimizer)
                optimizer.register_step_pre_hook(self._begin)
                optimizer.register_step_post_hook(self._gather_params)

    def rest(self) -> None:
        """Let steps be those of whole models, until the next call of `watch`."""
        self._local_model = None

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._nonfinite_steps.before_optimizer_step()
        own_progress().enter(Phase.OPTIMIZER)
        is_partial = self._local_model is not None and self._local_model.is_partial
        if is_partial and optimizer not in self._shown:  # a step may call that of its base class
            # Parameters of other stages have no gradient here, for which not all optimizers look.
            self._shown[optimizer] = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not p.is_meta]

    def _gather_params(self, optimizer: Optimizer, *_: Any) -> None:
        if self._local_model is None:
            return
        shown_groups = self._shown.pop(optimizer, [])  # also those of a step that has failed
        for group, shown in zip(optimizer.param_groups, shown_groups, strict=False):
            group["params"] = shown
        self._local_model.gather_params()
        if optimizer is self._optimizers[0]:
            own_progress().end_step()
