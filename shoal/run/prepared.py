"""Everything that a run has prepared, and the local model that the strategies have made of it.

prepare(...)                    models, optimizers and loaders are collected
apply                           strategies replace the models by this rank's piece of them:
                                in `prepare`, or in the first step if a strategy needs a batch
prepare(...) again              a new optimizer, a new loader, a frozen model; where every rank has
                                whole models trained ones and thawed layers too
optimizer.step()                hooks around it: new values reach all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.data.sharded_loader import ShardedLoader
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.step_closures import call_before_update
from shoal.run import startup_summary
from shoal.run.batch_size import BatchSizes
from shoal.run.checks import (
    check_context_has_ended,
    check_frozen_unchanged,
    check_no_renormalising,
    check_on_device,
    check_same_seeds,
)
from shoal.run.former_parameters import pass_on
from shoal.run.guards import Guards
from shoal.run.guards.absent_values import removed_gradients
from shoal.run.local_shard_step import step_local_shards
from shoal.run.loop_watch import LoopWatch
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.run.optimizer_binding import BoundGroups, bind_optimizers
from shoal.run.parameter_hooks import ParameterHooks
from shoal.run.preparation import (
    RunSettings,
    as_one_module,
    is_trained,
    named_models,
    seed_this_rank,
    shard_loader,
    trained_names,
)
from shoal.run.step import TrainingStep
from shoal.run.tracing import Tracing
from shoal.strategies import base
from shoal.strategies.single import single_device
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress
from shoal.weights.deferred_init import DeferredWeights, broadcast_filled, deferred_weights

NOTHING_PREPARED = (
    "no model was prepared. Before the loop: model, optimizer, loader = run.prepare(model, "
    "optimizer, loader)."
)


class Prepared:
    """The models, optimizers and loaders of a run on this rank.

    Attributes:
        models, optimizers: all models, in the order of `prepare`; those that step now.
        root: the model, or the group of all models that strategies apply to.
        loaders: of this rank's shares.
        sizes: finds the sizes of batches.
        watch: finds samples that a loop has mixed.
        step: the step of the local model; None before the strategies are applied.
        nonfinite_steps: judges each step.
        optimizer_steps: of the first optimizer, those of a resumed run included.

    Args:
        announce: prints a note, on rank 0.
        tracing: None without a trace.
    """

    def __init__(
        self,
        mesh: Mesh,
        strategies: Sequence[base.Strategy],
        settings: RunSettings,
        announce: Callable[[str], None],
        tracing: Tracing | None = None,
        guards: Guards | None = None,
    ) -> None:
        self.mesh = mesh
        self.settings = settings
        self.announce = announce
        self.tracing = tracing
        self._noted: set[str] = set()
        self.guards = guards or Guards()
        self.guards.note_once = self.note_once
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.loaders: list[ShardedLoader] = []
        self.watch = LoopWatch(mesh, self.guards.enabled, self.note_once)
        self.sizes = BatchSizes(self.loaders, mesh.data, self.watch, self.guards.batches)
        self.step: TrainingStep | None = None
        self.nonfinite_steps = NonfiniteSteps(mesh, settings, announce)
        self.optimizer_steps = 0
        self._is_stepping = False
        self._strategies = strategies
        self._is_announced = False
        self.root = as_one_module([])
        self._local_model: base.LocalModel | None = None
        self._trained: set[str] = set()
        self._frozen: dict[str, nn.Parameter] = {}
        self._bound = BoundGroups()
        self._hooked: WeakSet[Optimizer] = WeakSet()  # an id may be that of a later one
        self._shown: WeakKeyDictionary[Optimizer, list[list[Tensor]]] = WeakKeyDictionary()
        self._was_applied = False
        self._state_to_load: Sequence[Any] = ()

    def note_once(self, note: str, **facts: object) -> None:
        """Print a note on rank 0, once in a run.

        Args: facts: for its places in braces; other facts make no other note.
        """
        if note not in self._noted:
            self._noted.add(note)
            self.announce(note.format(**facts) if facts else note)

    def local_model(self) -> base.LocalModel:
        """Return the local model; the full model while strategies wait for the first batch.

        Raises: UsageError: there is no model, or a layer was thawed.
        """
        if self._local_model is None:
            raise UsageError(NOTHING_PREPARED)
        check_frozen_unchanged(self._frozen, self._strategies)
        return self._local_model

    def add(
        self, models: list[nn.Module], optimizers: list[Optimizer], loaders: list[Any]
    ) -> list[ShardedLoader]:
        """Add what `prepare` was given; return the loaders of this rank's shares. Collective.

        Raises:
            UsageError: an optimizer does not hold each trainable parameter exactly once; a loader
                cannot be shared out; a model lies on another device.
            StrategyRefused: the strategy cannot take these models or this number of ranks.
        """
        check_context_has_ended()
        new_models = [m for m in models if all(m is not known for known in self.models)]
        for model in new_models:
            check_on_device(model, self.mesh.device)
        recorder = None if self.tracing is None else self.mesh.recorder
        shared: list[ShardedLoader] = [
            loader  # is shared out already
            if any(loader is known for known in self.loaders)
            else shard_loader(loader, self.mesh, self.settings.seed, recorder, self.announce)
            for loader in loaders
        ]
        for loader in shared:
            loader.watch, self.watch.has_loader = self.watch, True
        self.loaders += [loader for loader in shared if loader not in self.loaders]
        self.models += new_models
        self._replace_optimizers(optimizers)
        if self.models:
            self._update(new_models, bool(optimizers))
        return shared

    def _replace_optimizers(self, new: list[Optimizer]) -> None:
        """Add optimizers; those that hold the same parameters as a new one are out of use."""

        def held(optimizer: Optimizer) -> set[int]:
            return {id(p) for group in self._bound.of(optimizer) for p in group}

        taken = set().union(*map(held, new))
        kept = [o for o in self.optimizers if o not in new and not held(o) & taken]
        self.optimizers = kept + new

    def _update(self, new_models: list[nn.Module], new_optimizers: bool) -> None:
        """Apply the strategies if they can be applied now, or again where that is necessary."""
        if self.step is None:
            self._begin(as_one_module(self.models))
            return
        assert self._local_model is not None
        changed = self._bound.replaced(self.root) if new_optimizers else []
        changed += trained_names(self.root) ^ self._trained
        if changed or any(map(is_trained, new_models)):
            self._apply_again()
        else:
            for model in new_models:  # a frozen model, such as a teacher
                self._make_whole(model)
            if new_optimizers:
                self._bind()

    def _begin(self, root: nn.Module) -> None:
        """Apply the strategies to whole models, or wait for what they need."""
        self.root = root
        self._local_model = single_device(root)
        self._note_trained()
        if not self.optimizers:  # a teacher, or a model whose optimizer comes later
            self._make_whole(root)
            return
        self._bound.names(self.optimizers, root)  # raises where one is missing
        begins = not self._was_applied
        if not self._is_announced:
            self._is_announced = True
            loader = self.loaders[0] if self.loaders else None
            for line in startup_summary.lines(
                root, loader, self.mesh, self.settings.accumulate, self._strategies
            ):
                self.announce(line)
        if self.mesh.size > 1 and any(each.needs_example_batch for each in self._strategies):
            # Until the first batch divides it, a script may evaluate the model on every rank.
            broadcast_filled(root, self.mesh)
            self._hook_optimizers()  # the first pass may be that of a closure, within a step
            self._install_guards()
        else:
            self.apply(None)
        if begins:  # last, for strategies that draw must draw the same on all ranks
            seed_this_rank(self.mesh, self.settings)

    def _make_whole(self, model: nn.Module) -> None:
        """Give weights of a model memory where they have none yet, and the first rank's values."""
        DeferredWeights(self.mesh.device).fill([model], keeps=True)
        self.mesh.broadcast_module(model)

    def _note_trained(self) -> None:
        """Remember which parameters are trained, and which are not."""
        self._trained = trained_names(self.root)
        self._frozen = {n: p for n, p in self.root.named_parameters() if not p.requires_grad}

    def apply(self, example: base.ExampleBatch | None) -> None:
        """Apply the strategies; with the first batch if one needs it. Collective."""
        groups = self._bound.names(self.optimizers, self.root)
        # Strategies look at hooks on parameters: a user's own would not know of a shard.
        check_no_renormalising(self.root, self.mesh.data.size)
        self.guards.remove()
        before = dict(self.root.named_parameters())
        weights = deferred_weights(self.root, self.mesh.device)
        if weights is not None:
            check_same_seeds(self.root, self.mesh)
        # A strategy may try passes of its own.
        with self.guards.phase:
            whole = single_device(self.root, example, weights)
            local_model = base.apply_strategies(whole, self._strategies, self.mesh)
        for line in local_model.summary_lines:
            self.announce(line)
        self._local_model = local_model
        self._note_trained()
        # By name: strategies may have replaced the parameters that the optimizers were made with.
        bind_optimizers(self.optimizers, groups, self.root, local_model, self.settings.loss_scale)
        self.step = TrainingStep(
            local_model,
            self.mesh,
            self.tracing,
            self.nonfinite_steps,
            ParameterHooks(local_model, before, self.mesh.size * self.settings.accumulate == 1),
        )
        pass_on(before, dict(self.root.named_parameters()))
        self._was_applied = True
        self._install()
        if self._state_to_load:
            local_model.strategy_state.load_state_dict(*self._state_to_load)
            self._state_to_load = ()
        if self.tracing is not None:
            self.tracing.wrap_step(local_model, self.optimizers[0])

    def _bind(self) -> None:
        """Bind new optimizers to the parameters that this rank owns already."""
        local_model = self.local_model()
        groups = self._bound.names(self.optimizers, self.root)
        if local_model.remote_optimizer is not None:
            raise StrategyRefused(
                "prepare: a second optimizer after training has begun: parameter servers keep the "
                "first one's settings. Change the groups of the first optimizer, or use ddp or "
                "zero."
            )
        self.guards.remove()
        for optimizer in self.optimizers:  # their state stays where it is
            for group, shown in zip(optimizer.param_groups, self._bound.of(optimizer), strict=True):
                group["params"] = shown
        bind_optimizers(self.optimizers, groups, self.root, local_model, self.settings.loss_scale)
        self._install()

    def _install(self) -> None:
        """Watch the optimizers, guard the models, and note what is bound to the local model."""
        local_model = self.local_model()
        own_progress().set_stage(self.mesh.pipeline.rank)
        self.nonfinite_steps.watch(local_model)
        if local_model.remote_optimizer is not None and self.guards.enabled:
            parameters = local_model.trainable_params
            local_model.remote_optimizer.removed = partial(removed_gradients, parameters)
        self._hook_optimizers()
        if local_model.has_sharded_params:
            for optimizer in self.optimizers:
                step_local_shards(optimizer)
        self.watch.enabled &= local_model.strategy_state.is_synchronous
        self._install_guards()
        self._bound.note(self.root, local_model.trainable_params)

    def _hook_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if optimizer not in self._hooked:
                self._hooked.add(optimizer)
                call_before_update(optimizer, partial(self._before_update, ref(optimizer)))
                optimizer.register_step_post_hook(self._after_optimizer_step)

    def _before_update(self, of: ref[Optimizer]) -> None:
        self.nonfinite_steps.before_optimizer_step()
        own_progress().enter(Phase.OPTIMIZER)
        self.guards.before_update()
        optimizer = of()
        assert optimizer is not None  # it steps
        self._is_stepping |= optimizer is self.optimizers[0]
        if self.step is None or optimizer in self._shown:  # a step may call that of its base class
            return
        if self._local_model is not None and self._local_model.is_partial:
            # Parameters of other stages have no gradient here, for which not all optimizers look.
            self._shown[optimizer] = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not p.is_meta]

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Bring the new values to all ranks. While no strategy is applied, models are whole."""
        self.guards.after_update()
        if optimizer is self.optimizers[0]:
            self.optimizer_steps += self._is_stepping  # once, if it calls that of its base class
            self._is_stepping = False
        if self.step is None or self._local_model is None:
            return
        shown_groups = self._shown.pop(optimizer, [])  # also those of a step that has failed
        for group, shown in zip(optimizer.param_groups, shown_groups, strict=False):
            group["params"] = shown
        self._local_model.gather_params()
        if optimizer is self.optimizers[0]:
            own_progress().end_step()

    def _install_guards(self) -> None:
        """Guard the models as they are now. Called on all ranks."""
        models, local_model = named_models(self.models), self.local_model()
        self.guards.install(models, self.optimizers, local_model, self.mesh)

    def _apply_again(self) -> None:
        """Apply the strategies anew, where every rank has whole parameters. Collective."""
        if not all(strategy.can_apply_again for strategy in self._strategies):
            raise StrategyRefused(
                "prepare: other parameters are trained than in the first prepare, and this "
                "strategy has divided or sent away those of the first. Give all models to the "
                "first prepare, with all layers trainable that any phase trains, and a learning "
                "rate of 0 for those that rest; or save with run.save(path) and train the next "
                "phase in a run of its own (run = shoal.init(), as for each fold); or use ddp."
            )
        root = as_one_module(self.models)
        self._bound.names(self.optimizers, root)  # raises where one is missing
        assert self._local_model is not None
        self.guards.remove()
        state = self._local_model.strategy_state
        state.synchronize()
        self._state_to_load = state.state_dict(), state.rank_state_dict()
        self._local_model.outside_step.close()
        self._bound = BoundGroups()
        self.step = None
        self._begin(root)
