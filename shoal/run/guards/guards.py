"""All guards of a run: installed after the strategies are applied, asked at each step, removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.run.batch_size import BatchHistory
from shoal.run.guards.absent_values import AbsentGradients, guard_absent_weights
from shoal.run.guards.backward_hooks import guard_backward
from shoal.run.guards.forward_writes import ForwardWrites
from shoal.run.guards.full_state import cut_given_weights, guard_state_requests, note_state_requests
from shoal.run.guards.grad_clipping import guard_clipping
from shoal.run.guards.guarded_models import GuardedModels, StepPhase
from shoal.run.guards.optimizer_state import OptimizerStates
from shoal.run.guards.rank_agreement import check_equal_weights, guard_agreement
from shoal.run.guards.refused_calls import guard_refused_calls
from shoal.run.guards.shard_functions import guard_shards
from shoal.run.guards.weight_writes import WeightWatch
from shoal.strategies.base import LocalModel, no_op

NOT_ZEROED = (
    "the gradients of the last step were not zeroed, as that of {name}: one device would add those "
    "of the next pass to them, and the servers no longer hold them. Call optimizer.zero_grad() "
    "after each step, or before each pass; or use ddp or zero1."
)
STEPPED_AGAIN = (
    "optimizer.step(){site}: a second step by the gradients of one pass, which one device would "
    "take, and the servers no longer hold them. Compute them again before each step; or use ddp or "
    "zero1."
)
"""Errors about gradients that servers have stepped."""


class Guards:
    """Turns what bypasses `run` into something that works, or into an error with the cure.

    Args:
        enabled: False leaves out what costs time in steps, such as stand-ins for gradients,
            comparisons of numbers, and looks at weights. Backward passes outside of
            steps go on then.
        strategy: name for messages, such as "zero3".
        compares_weights: ranks that hold the same weights compare them. False for `shoal train`,
            which calls `run.check_replicas`.
    """

    def __init__(
        self, enabled: bool = True, strategy: str = "", compares_weights: bool = True
    ) -> None:
        self.enabled = enabled
        self._compares_weights = compares_weights
        self.phase = StepPhase()
        self.batches = BatchHistory()
        # Makes a collective call under its name, so that an error tells where other ranks are.
        self.at: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self.note_once: Callable[..., None] = no_op  # prints a note, with facts by name
        self._under = f" under {strategy}" if strategy else ""
        self._undo = ExitStack()  # removes all hooks, and puts back all that was replaced
        self._guarded: GuardedModels | None = None
        self._is_script_searched = True
        self._absent: AbsentGradients | None = None
        self._weights: WeightWatch | None = None
        self._states: OptimizerStates | None = None
        self._forward_writes: ForwardWrites | None = None  # until the end of the first step

    def install(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        local_model: LocalModel,
        mesh: Mesh,
    ) -> None:
        """Guard models and optimizers from now on, instead of those before. Called on all ranks."""
        self.remove()
        guarded = GuardedModels(
            dict(models), optimizers, local_model, mesh, self._under, self.phase, self.note_once
        )
        self._guarded, self._is_script_searched = guarded, False
        undo = self._undo
        cut_given_weights(guarded, undo)
        guard_state_requests(guarded, undo)
        guard_refused_calls(guarded, undo)
        guard_clipping(guarded, undo)
        guard_shards(guarded, undo)
        guard_absent_weights(guarded, undo)
        if not self.enabled:
            return
        guard_backward(guarded, undo)
        guard_agreement(guarded, undo, self._compares_weights, self.batches, self.at)
        if guarded.absent_gradients:
            self._absent = AbsentGradients(guarded.absent_gradients, guarded.under)
        if local_model.remote_optimizer is not None:
            self._weights = WeightWatch(guarded, undo)
        if local_model.has_sharded_params and not local_model.is_partial:
            self._forward_writes = ForwardWrites(guarded, undo)
        if local_model.remote_optimizer is not None or local_model.is_partial:
            self._states = OptimizerStates(guarded, undo)

    def remove(self) -> None:
        """Remove all hooks, and put back all that was replaced."""
        if self._absent is not None:
            self._absent.hide()
        self._undo.close()
        self._absent = self._weights = self._states = self._guarded = None
        self._forward_writes = None

    def before_update(self) -> None:
        """Let an optimizer see no gradients that are elsewhere.

        Raises: UsageError: servers have stepped them.
        """
        if self._absent is not None:
            remote = None if self._guarded is None else self._guarded.local_model.remote_optimizer
            if remote is not None and not remote.has_pushed and self._absent.shown():
                raise UsageError(STEPPED_AGAIN.format(site=call_site()))
            self._absent.hide_from_update()

    def after_update(self) -> None:
        """Let the script see again which gradients are elsewhere."""
        if self._absent is not None:
            self._absent.show_after_update()

    def before_step(self) -> None:
        """Check what was done since the last step. Call it first in `forward_backward`.

        Raises: UsageError: weights or optimizer state were written that would be lost; gradients
            that servers have stepped were not zeroed.
        """
        if self._guarded is not None and not self._is_script_searched:
            self._is_script_searched = True
            note_state_requests(self._guarded)
        if self._states is not None:
            self._states.check()
        if self._absent is not None and self._guarded is not None:
            if (remote := self._guarded.local_model.remote_optimizer) is not None:
                remote.zeroed = zeroed = self._absent.zeroed()
                kept = self._absent.shown() - zeroed
                if kept and not remote.has_pushed:
                    raise UsageError(NOT_ZEROED.format(name=min(kept)))
            self._absent.hide()
        if self._weights is not None:
            self._weights.begin_passes()

    def check_weights(self) -> None:
        """Raise UsageError if weights were written that would be lost."""
        if self._weights is not None and not self.phase.in_edit:
            self._weights.check()

    def check_equal_weights(self) -> None:
        """Raise UsageError if ranks that hold the same weights have other ones. Collective."""
        if self.enabled and self._compares_weights and self._guarded is not None:
            check_equal_weights(self._guarded)

    def accept_weights(self) -> None:
        """Take the present weights for those of the servers, which have been sent them."""
        if self._weights is not None:
            self._weights.accept()

    def after_step(self) -> None:
        """Show stand-ins for gradients that are elsewhere.

        Raises: UsageError: in the first step, if a forward pass has written a weight in shards.
        """
        if self._forward_writes is not None:
            writes, self._forward_writes = self._forward_writes, None
            writes.check()
        if self._absent is not None:
            self._absent.show()

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Let the user write weights in this context, the same on all ranks. Collective.

        All ranks hold the same weights at its beginning. At its end, servers are sent those of the
        first rank.

        Raises: UsageError: the gradients of a step are with the servers.
        """
        guarded = self._guarded
        assert guarded is not None, "nothing is prepared"
        state = guarded.local_model.strategy_state
        self.check_weights()
        state.synchronize()
        remote = guarded.local_model.remote_optimizer
        if remote is not None and remote.has_pushed:
            raise UsageError(
                "run.edit(): the servers have gradients of the weights as they are. Call "
                "optimizer.step() first."
            )
        self.phase.in_edit = True
        try:
            yield
            if remote is not None:
                for parameter in guarded.local_model.trainable_params.values():
                    guarded.mesh.broadcast_tensor(parameter.detach())
                for optimizer in guarded.optimizers:
                    state.pull_state(optimizer)
                    state.push_state(optimizer)
        finally:
            self.phase.in_edit = False
            self.accept_weights()
