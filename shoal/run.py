"""The library's face: `init`, `prepare`, `forward_backward`, `save`.

run = shoal.init()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = run.forward_backward(F.cross_entropy, model, x, y)
    optimizer.step()
run.save("model.pt")
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from shoal import binding, header
from shoal.comm.mesh import Mesh, join
from shoal.comm.norm import global_norm, local, whole
from shoal.data.loader import ShareLoader
from shoal.data.nest import nested
from shoal.data.seeds import load_random_state, random_state, stream
from shoal.errors import CheckpointError, ConfigError, StrategyRefused, UsageError
from shoal.evaluate import Measures, evaluate
from shoal.in_backward import InBackward, mean_only, refuse_with
from shoal.launch.environment import read
from shoal.strategies import base, parse
from shoal.strategies.accumulate import Accumulate
from shoal.strategies.compile import Compile
from shoal.strategies.precision import LossScale, Precision, unscale

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
PrecisionName = Literal["fp64", "fp32", "bf16", "fp16"]


def init(
    strategy: str = "ddp",
    *,
    seed: int = 0,
    accumulate: int = 1,
    precision: PrecisionName = "fp32",
    compile: bool = False,
    step_in_backward: bool = False,
    announce: Callable[[str], None] = print,
) -> Run:
    """Take this process's place in the world that the launcher made. Collective: every rank calls it first.

    Under `shoal launch`, torchrun, srun or mpirun the place is read from their variables; a plain `python script.py` is
    a world of one. Sets the current CUDA device where there are GPUs, and seeds torch, Python and NumPy alike on every
    rank, so that every rank builds the same model.

    Args:
        strategy: how several ranks train one model, e.g. "ddp"; `shoal launch --strategy` overrides it.
        seed: from which the order of samples, augmentation and dropout follow.
        accumulate: parts that each rank's share of a batch is computed in, to save memory.
        precision: "bf16" and "fp16" run the forward pass under autocast.
        compile: compile the model with torch.compile.
        step_in_backward: step each parameter inside the backward pass, as soon as its gradient is known, and free the
            gradient. The loop stays as it is; its `optimizer.step()` has nothing left to do.
        announce: is given what there is to say before the first step; called on rank 0 only.

    Raises: EnvironmentConflict: the launcher's variables contradict each other. ConfigError: no such strategy, or
        step_in_backward with accumulate or fp16.
    """
    return begin(
        os.environ.get("SHOAL_STRATEGY", strategy),
        seed=seed,
        accumulate=int(os.environ.get("SHOAL_ACCUMULATE", accumulate)),
        precision=precision,
        compile=compile,
        step_in_backward=step_in_backward,
        announce=announce,
    )


def begin(
    strategy: str,
    *,
    seed: int = 0,
    accumulate: int = 1,
    precision: PrecisionName = "fp32",
    compile: bool = False,
    step_in_backward: bool = False,
    announce: Callable[[str], None] = print,
) -> Run:
    """`init` for a job that has all its settings from elsewhere: nothing is overridden. Collective."""
    if accumulate < 1:
        raise ConfigError([f"accumulate: {accumulate} must be greater than 0"])
    if step_in_backward:
        refuse_with(accumulate, loss_scale=precision == "fp16")
    chosen = parse(strategy)
    mesh = join(read(os.environ), helpers=any(getattr(strategy, "helpers", False) for strategy in chosen))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    scale = LossScale() if precision == "fp16" else None
    strategies: list[base.Strategy] = [Precision(precision, scale)]
    strategies += [Compile()] if compile else []
    strategies += [*chosen, Accumulate(accumulate)]
    say = announce if mesh.rank == 0 else _silent
    return Run(mesh, strategies, seed, accumulate, scale, say, step_in_backward)


class Run:
    """One training run, seen from one rank. Made by `shoal.init`.

    Attributes:
        rank, world: this process's number, and how many there are.
        device: where this rank's model and batches belong.
        totals: sums over all ranks of the last step: see `shoal.strategies.base`. None before the first.
    """

    def __init__(
        self,
        mesh: Mesh,
        strategies: list[base.Strategy],
        seed: int,
        accumulate: int,
        loss_scale: LossScale | None,
        announce: Callable[[str], None],
        step_in_backward: bool = False,
    ) -> None:
        self.mesh, self.rank, self.world, self.device = mesh, mesh.rank, mesh.size, mesh.device
        self.totals: Tensor | None = None
        self._strategies, self._seed, self._accumulate = strategies, seed, accumulate
        self._loss_scale, self._announce = loss_scale, announce
        self._step_in_backward = step_in_backward
        self._early: InBackward | None = None
        self._part: base.Part | None = None
        self._optimizer: Optimizer | None = None
        self._loader: ShareLoader | None = None
        self._frozen: dict[str, nn.Parameter] = {}
        self._inside = False
        self._stop = False

    def prepare(
        self, model: Model, optimizer: AnyOptimizer, loader: DataLoader | None = None
    ) -> tuple[Model, AnyOptimizer, Any]:
        """Make model, optimizer and loader those of this rank. Collective.

        The model keeps its class, its parameters' names and its `state_dict`; the optimizer is the same object, bound
        to what this rank owns; the loader yields this rank's share of every global batch of `loader.batch_size`.

        Raises:
            UsageError: called twice; an optimizer that does not hold each trainable parameter exactly once; a loader
                whose batches cannot be shared out.
            StrategyRefused: the strategy cannot take this model or world.
        """
        if self._part is not None:
            raise UsageError("this run has prepared a model already; call shoal.init() once for each model.")
        self._refuse_misplaced(model)
        if loader is None and self._accumulate > 1:
            raise UsageError("accumulate splits what the loader shares out; prepare a loader, or use accumulate=1.")
        if loader is None and self._step_in_backward:
            raise UsageError(
                "step_in_backward needs the size of the global batch before the backward pass. Prepare a loader, or "
                "use step_in_backward=False."
            )
        groups = binding.names_in(optimizer, model)
        shared = None if loader is None else ShareLoader(loader, self.rank, self.world, self._seed)
        self._say(model, shared)
        part = base.cut(base.whole(model), self._strategies, self.mesh)
        binding.refuse_shards(optimizer, part.owned)
        binding.bind(optimizer, groups, part.owned)
        if part.remote is not None:
            self._refuse_remote()
            part.remote.take(optimizer)
        self._early = InBackward(optimizer, part) if self._step_in_backward else None
        model.register_forward_hook(self._watch)
        optimizer.register_step_post_hook(lambda *_: part.gather())
        # From here on ranks draw differently: the same dropout mask on every rank would be a smaller sample.
        torch.manual_seed(stream(self._seed, self.rank))
        self._part, self._optimizer, self._loader = part, optimizer, shared
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        return model, optimizer, shared

    def forward_backward(
        self, loss_fn: base.LossFunction, model: nn.Module, *batch: Any, measure: base.Measure | None = None
    ) -> Tensor:
        """Forward and backward of this rank's share of a global batch. Collective.

        Afterwards `.grad` holds the global means; the optimizer's step comes next. With `step_in_backward` the
        parameters are stepped by then, and there are no gradients. An error in the middle leaves some stepped.

        Args:
            loss_fn: (output, target) -> scalar mean over its batch, or (sum, count) where samples weigh differently.
            model: what `prepare` returned.
            batch: the model's inputs, then the target: `loss_fn(model(*inputs), target)`.
            measure: (output, target) -> 1-D tensor of sums over the batch, for `measured`.

        Returns: the global mean loss, a detached scalar on the device: the same on every rank.
        """
        part = self._prepared(model)
        *inputs, target = batch
        share = None if self._loader is None else self._loader.share
        if share is None:
            # Nobody knows the other ranks' rows: the loss counts for itself, and the counts ride with the gradients.
            loss_fn, rows, global_rows = _counted(loss_fn, _length(target)), 1, 1
        else:
            rows, global_rows = share.rows, share.global_rows
            _check_rows(batch, rows)
        if self._early is not None:
            loss_fn = mean_only(loss_fn)
        step = base.Batch(loss_fn, tuple(inputs), target, rows, global_rows, measure, self._stop)
        earlier = _take_gradients(part) if self._early is None else {}
        self._inside = True
        try:
            with nullcontext() if self._early is None else self._early.during():
                loss = part.run(part.forward, step)
                part.reduce()
        finally:
            self._inside = False
        base.settle(part, loss, global_rows)
        if self._loss_scale is not None and not unscale(part, self._loss_scale):
            earlier.clear()  # the whole step is skipped
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.totals = loss.totals
        count = base.nonzero_count(loss.totals) if loss.weighed else global_rows
        return loss.totals[base.LOSS_SUM] / count

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        Returns: the norm before, a scalar tensor. Call it between `forward_backward` and `optimizer.step()`.
        """
        part = self._prepared()
        self._refuse_without_gradients("clip_gradients", "clipping needs the norm of all gradients at once")
        gradients = [p.grad for p in part.owned.values() if p.grad is not None]
        norm = global_norm(gradients) if part.remote is None else part.remote.norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
        if part.remote is not None:
            part.remote.scale(factor)
        return norm

    def gradients(self) -> dict[str, Tensor | None]:
        """Every trainable parameter's gradient, whole, under its own name. Collective."""
        self._refuse_without_gradients("gradients", "they have been used and freed")
        part = self._prepared()
        if part.remote is not None:
            return part.remote.gradients()
        return {n: None if p.grad is None else whole(p.grad) for n, p in part.owned.items()}

    def weights(self) -> dict[str, Tensor]:
        """The whole model's `state_dict`, under its own names. Collective."""
        self.agree()
        return {name: whole(value) for name, value in _tensors(self._prepared().module).items()}

    def report(self) -> list[str]:
        """Lines about what went on beside the steps, for the end of a run: staleness that servers have seen."""
        remote = self._prepared().remote
        return [] if remote is None else remote.report()

    def announce(self, directory: Path) -> None:
        """Let `shoal servers DIRECTORY` find this run's parameter servers, if it has any. For rank 0."""
        remote = self._prepared().remote
        if remote is not None:
            remote.announce(directory)

    @property
    def in_step(self) -> bool:
        """Whether all ranks take each step together, so that it has global gradients."""
        remote = self._prepared().remote
        return remote is None or remote.together

    def wait(self) -> None:
        """Until this rank holds the weights of the last step; the model's next forward pass waits by itself.

        Call it before you read parameters in another way. Only parameter servers leave anything to wait for.
        """
        remote = self._prepared().remote
        if remote is not None:
            remote.wait()

    def agree(self) -> bool:
        """Until all ranks hold the same weights, those of all steps; whether they had been apart. Collective.

        They are apart between the steps of parameter servers with staleness. `evaluate`, `save` and `weights` begin
        with it.
        """
        remote = self._prepared().remote
        return remote is not None and remote.agree()

    def evaluate(self, measure: Measures, model: nn.Module, loader: DataLoader) -> dict[str, float]:
        """Sums over every sample of `loader`'s data set, each counted once, at any number of ranks. Collective.

        Args:
            measure: (output, target) -> name -> scalar sum over the batch, e.g. correct predictions.
            model: prepared or not; it is put into evaluation mode and back.
            loader: a plain DataLoader; its `batch_size` is what one rank computes at once.

        Returns: the sums, and `samples`.
        """
        part = self._part if self._part is not None and model is self._part.module else None
        if part is not None:
            self.agree()
        try:
            return evaluate(self.mesh, measure, model, loader, self.move, part is not None and part.all_forward)
        finally:
            if part is not None:
                part.release()

    def move(self, batch: Any) -> Any:
        """A nest of tensors on this rank's device."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        return nested(batch, self.move)

    def request_stop(self) -> None:
        """Ask all ranks to stop; safe in a signal handler. They learn of it with the next step's gradients."""
        self._stop = True

    def stopping(self) -> bool:
        """Whether any rank had asked to stop when the last step began: the same answer on every rank.

        Waits for the device; on a GPU ask every few steps.
        """
        return self.totals is not None and bool(self.totals[base.STOP] > 0)

    def save(self, path: str | Path) -> None:
        """Write the whole model's `state_dict`, under the user's own names, as `torch.save` does. Collective.

        The file is replaced in one piece or not at all. Read it with `torch.load(path, weights_only=True)`.
        """
        model = self._prepared().module
        self.agree()
        self.mesh.broadcast_buffers(model)
        state = {}
        for name, value in _tensors(model).items():
            full = whole(value)  # one at a time: only rank 0 keeps them
            if self.rank == 0:
                state[name] = full.cpu() if full is not value else value
        if self.rank == 0:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(target.name + ".tmp")
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        self.mesh.barrier()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Everything that the rest of the run depends on, as (tensors, info, private). Collective.

        `tensors` are the same on every rank, `info` is made of JSON values, `private` is this rank's random state.
        Given back to `load_state`, the run goes on bit for bit at the same number of ranks.
        """
        part, optimizer = self._prepared(), self._optimizer
        assert optimizer is not None
        self.agree()
        if part.remote is not None:
            part.remote.collect(optimizer)
        self.mesh.broadcast_buffers(part.module)
        tensors = {f"model.{name}": value for name, value in _tensors(part.module).items()}
        gathered, scalars = binding.optimizer_state(optimizer, part.owned)
        tensors |= {f"optimizer.{name}": value for name, value in gathered.items()}
        info: dict[str, Any] = {"optimizer": scalars, "groups": binding.group_settings(optimizer)}
        if self._loader is not None:
            info["data"] = self._loader.state()
        if self._loss_scale is not None:
            info["loss_scale"] = self._loss_scale.state()
        private = random_state(self.device) | ({} if part.remote is None else part.remote.private())
        return tensors, info, private

    def like(self) -> Callable[[str], Tensor | None]:
        """Tells for each name in the tensors of `state` how this rank holds it, before there is any: see `Saved`."""
        part = self._prepared()
        held = {f"model.{name}": value for name, value in part.module.state_dict().items()}

        def owner(name: str) -> Tensor | None:
            return part.owned.get(binding.located(name.removeprefix("optimizer."), part.owned)[0])

        return lambda name: held.get(name, owner(name) if name.startswith("optimizer.") else None)

    def load_state(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]) -> None:
        """The inverse of `state`. Collective; after `prepare`. `private` is empty when the world has changed."""
        part, optimizer = self._prepared(), self._optimizer
        assert optimizer is not None
        lacking = [name for name in ("optimizer", "groups") if name not in info]
        if lacking:
            raise CheckpointError(f"the checkpoint lacks {' and '.join(lacking)}: another version of Shoal wrote it.")
        self.wait()
        part.module.load_state_dict(_below("model.", tensors))
        binding.load_optimizer_state(optimizer, part.owned, _below("optimizer.", tensors), info["optimizer"])
        binding.load_group_settings(optimizer, info["groups"])
        if part.remote is not None:
            part.remote.spread(optimizer)
        if self._loader is not None and "data" in info:
            self._loader.restore(info["data"])
        if self._loss_scale is not None and "loss_scale" in info:
            self._loss_scale.load(info["loss_scale"])
        if private:
            load_random_state(private)
        if private and part.remote is not None:
            part.remote.load_private(private)

    def _say(self, model: nn.Module, loader: ShareLoader | None) -> None:
        if loader is not None:
            self._announce(header.spell_batch(loader.batch_size, self.world, self._accumulate))
        if self.mesh.place.launcher not in ("single", "shoal"):
            self._announce(self.mesh.place.describe())
        if torch.cuda.is_available() and self.device.type == "cpu":
            ranks, gpus = self.mesh.place.local_world, torch.cuda.device_count()
            self._announce(f"note: {ranks} ranks on this machine and {gpus} GPUs: training on the CPU")
        notes = [note for strategy in self._strategies for note in getattr(strategy, "notes", [])]
        for note in [*header.differences(model, self.world, self._accumulate), *notes]:
            self._announce(f"note: {note}")

    def _prepared(self, model: nn.Module | None = None) -> base.Part:
        if self._part is None:
            raise UsageError(
                "no model was prepared. Before the loop: "
                "model, optimizer, loader = run.prepare(model, optimizer, loader)."
            )
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise UsageError(
                f"{', '.join(thawed)}: unfrozen after prepare, so no optimizer steps it. Unfreeze it before "
                "run.prepare(...), or freeze it again."
            )
        if model is not None and model is not self._part.module:
            raise UsageError(
                f"forward_backward was given a {type(model).__name__} that is not the prepared model. Use the one that "
                "run.prepare returned."
            )
        return self._part

    def _refuse_remote(self) -> None:
        if self._loss_scale is not None:
            raise StrategyRefused("fp16 skips a step if any gradient overflows; servers cannot skip one. Use bf16.")
        if self._step_in_backward:
            raise StrategyRefused("step_in_backward: servers step the parameters. Use step_in_backward=False.")

    def _refuse_without_gradients(self, call: str, reason: str) -> None:
        if self._early is not None:
            raise UsageError(f"{call}: with step_in_backward {reason}. Use step_in_backward=False.")

    def _refuse_misplaced(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.device != self.device:
                raise UsageError(
                    f"{name} is on {parameter.device}; this rank's device is {self.device}. Call model.to(run.device) "
                    "before the optimizer is built."
                )

    def _watch(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        """Outside `forward_backward`, an output may be looked at, but not be differentiated."""
        if not self._inside and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(_refuse_bare_backward)


def _refuse_bare_backward(_: Tensor) -> None:
    raise UsageError(
        "a bare .backward() reached a prepared model: its gradients would be this rank's alone. Use "
        "loss = run.forward_backward(loss_fn, model, x, y) instead of loss_fn(model(x), y) and loss.backward()."
    )


def _take_gradients(part: base.Part) -> dict[nn.Parameter, Tensor]:
    """Gradients of earlier calls, out of the way of what is done to this call's; none after `zero_grad()`.

    Copies, for they may lie in a bucket that this call will fill again.
    """
    earlier = {p: p.grad.clone() for p in part.owned.values() if p.grad is not None}
    for parameter in earlier:
        parameter.grad = None
    return earlier


def _check_rows(batch: tuple[Any, ...], rows: int) -> None:
    """Refuse a batch that is clearly not the one that the loader yielded last.

    Samples may stand in the second dimension, or a batch may be flattened to so many rows each.
    """
    tensors = [item for item in batch if isinstance(item, Tensor) and item.dim()]
    wrong = [t for t in tensors if t.shape[0] % max(rows, 1) and (t.dim() < 2 or t.shape[1] != rows)]
    if wrong and len(wrong) == len(tensors):
        raise UsageError(
            f"forward_backward was given a batch of shape {tuple(wrong[0].shape)}; the loader's last share has "
            f"{max(rows, 1)} samples. Call it on each batch before the next one is fetched, or prepare without the "
            "loader for batches of your own."
        )


def _counted(loss_fn: base.LossFunction, rows: int) -> base.LossFunction:
    """`loss_fn` as a (sum, count) pair."""

    def counted(output: Any, target: Any) -> tuple[Tensor, Tensor]:
        value = loss_fn(output, target)
        return value if isinstance(value, tuple) else (value * rows, value.new_full((), rows))

    return counted


def _length(target: Any) -> int:
    if isinstance(target, Mapping):
        return _length(next(iter(target.values())))
    return _length(target[0]) if isinstance(target, (tuple, list)) else len(target)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(f"{', '.join(other)}: extra state that is no tensor cannot be saved without pickle.")
    return state


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _silent(_: str) -> None:
    """What ranks other than 0 have to say."""
