"""`ShoalStrategy`: the Trainer of Lightning, with its steps under any strategy.

    trainer = L.Trainer(strategy=ShoalStrategy("zero3"), max_epochs=3)

Lightning's loops, callbacks, loggers and bars are as they are; it divides no batch and wraps no
model.

    train_dataloader ──> run.prepare ──> training_step(this rank's rows) ──> run.backward(loss)
    a pipeline       ──> run.prepare ──> run.forward_backward(training_step), called by each stage
    other loaders    ──> every rank reads all of it

The batch size of a training loader is that of the global batch. It does not change with the number
of ranks, and neither do the losses.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import shoal
from shoal.data.tree_map import tensors_in
from shoal.errors import CheckpointError, UsageError
from shoal.platform.optional_packages import missing
from shoal.run.run_checkpoints import RunCheckpoints
from shoal.strategies.loss_terms import Counted, summed

# Two packages hold the same code, and each knows its own classes alone.
_PACKAGE = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
if _PACKAGE == "lightning.pytorch" and (sentences := missing("lightning")):
    raise ImportError(f"shoal.integrations.lightning: {sentences[0]}")
_Strategy: Any = import_module(f"{_PACKAGE}.strategies").Strategy
_plugins: Any = import_module(f"{_PACKAGE}.plugins")
_automatic: Any = import_module(f"{_PACKAGE}.loops.optimization.automatic")
_rank_zero: Any = import_module(f"{_PACKAGE}.utilities.rank_zero")

STATE = ".shoal"
"""The end of the directory beside a checkpoint, with the state of the run in Shoal's own format."""
TRAINING_LOADER = "train_dataloader()"
"""The barrier that Lightning passes before it hands over loaders for training."""

ROWS = "rows"
FLAGS = ("prog_bar", "logger", "on_step", "on_epoch")
"""Options of `self.log` that are kept under a pipeline."""
IGNORED = {"sync_dist", "batch_size"}

_BASES = import_module(_PACKAGE).LightningModule.__mro__


class ShoalStrategy(_Strategy):
    """A `Strategy` of Lightning whose steps are those of a run.

    `shoal launch -n 4 train.py`, torchrun or srun starts the ranks, and `Trainer(devices=...)` says
    nothing. Every rank validates, tests and predicts all samples. A checkpoint has the whole model,
    as `load_from_checkpoint` reads it, and beside it a directory with the state of the run, which
    resumes under any strategy and on any number of ranks.

    Args:
        strategy: of `shoal.init`; `shoal launch --strategy` overrides it.
        options: of `shoal.init`, such as `precision="bf16"`. The seed is that of `seed_everything`,
            if it was called before.

    Raises: UsageError: the Trainer is to do what `shoal.init` decides, such as mixed precision.
    """

    strategy_name = "shoal"

    def __init__(self, strategy: str | Mapping[str, Any] = "ddp", **options: Any) -> None:
        super().__init__()
        if (seed := _last_seed()) is not None:
            options.setdefault("seed", seed)
        self.run = shoal.init(strategy, **options)
        self.world_size, self.global_rank = self.run.world_size, self.run.rank
        self.local_rank = self.run.local_rank
        _rank_zero.rank_zero_only.rank = self.run.rank
        # Outside of steps Lightning would give each rank other samples.
        self.is_distributed = False
        self._layer_sync: Any = None  # set by sync_batchnorm=True
        self._trainer: Any = None
        self._is_training_loader = False
        self._loader: Any = None
        self._loss: Any = None
        self._prepared: Any = None
        self._checkpoint_path: Path | None = None

    @property
    def root_device(self) -> torch.device:
        return self.run.device

    @property
    def is_global_zero(self) -> bool:
        return self.run.rank == 0

    def setup(self, trainer: Any) -> None:
        """Prepare the module and its optimizers. Collective.

        Raises: UsageError: the Trainer is to do what `shoal.init` decides.
        """
        self._check(trainer)
        self._trainer = trainer
        module, fits = self.lightning_module, trainer.state.fn.value == "fit"
        if self._prepared is not module:
            super().setup(trainer)
            models = [module]
        else:  # ranks share it, and it is where it belongs
            self.accelerator.setup(trainer)
            models = []
            if fits:
                self.setup_optimizers(trainer)
        if not fits:
            return
        self.run.prepare(*models, *self.optimizers)
        self._prepared = module
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        if self.run.mesh.pipeline.size > 1:
            automatic = trainer.fit_loop.epoch_loop.automatic_optimization
            automatic._make_closure = partial(self._closure_of_stages, automatic)
        for part in module.modules():
            if hasattr(part, "distributed_available_fn"):  # of torchmetrics
                part.distributed_available_fn = self._is_divided

    def _check(self, trainer: Any) -> None:
        """Raise UsageError about settings of the Trainer that the strategy would not heed."""
        wrong = []
        if type(self.precision_plugin) not in (_plugins.Precision, _plugins.DoublePrecision):
            precision = self.precision_plugin.precision
            wrong.append(f'precision={precision!r} is ShoalStrategy(..., precision="bf16")')
        if self._layer_sync is not None:
            wrong.append("sync_batchnorm=True is ShoalStrategy(..., sync_batchnorm=True)")
        if wrong:
            raise UsageError(f"Trainer: {'; '.join(wrong)}.")
        module = type(self.lightning_module)
        if "backward" in {name for each in module.__mro__[: -len(_BASES)] for name in vars(each)}:
            raise UsageError(
                f"{module.__name__}.backward: gradients are computed by run.backward, for all "
                "ranks. Leave the method out."
            )
        if self.world_size == 1 and trainer.num_devices * trainer.num_nodes > 1:
            _rank_zero.rank_zero_warn(
                f"Trainer(devices={trainer.num_devices}): this is one process. Start more by "
                f"`shoal launch -n {trainer.num_devices} {sys.argv[0]}`."
            )

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's rows for training, and any other as it is. Collective."""
        if not self._is_training_loader:
            return dataloader
        self._loader = self.run.prepare(dataloader)
        return self._loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` as its forward pass, which strategies watch."""
        module = self.lightning_module
        if self.run.mesh.pipeline.size > 1:
            with self.precision_plugin.train_step_context():
                return self._keep_loss(module.training_step(*args, **kwargs))
        log = partial(self._log_of_rows, module.log, args[0])
        with self.precision_plugin.train_step_context(), self._logging(log):
            if not module.automatic_optimization:  # its backward pass is inside of the step
                return module.training_step(*args, **kwargs)
            result = self._forward_redirection(module, module, "training_step", *args, **kwargs)
        return self._keep_loss(result)

    def _keep_loss(self, result: Any) -> Any:
        """Keep the loss of a step; return what Lightning takes: a counted loss as a tensor."""
        is_mapping = isinstance(result, Mapping)
        self._loss = result.get("loss") if is_mapping else result
        if not isinstance(self._loss, Counted):
            return result
        parts = (t.value if t.count is None else t.value / t.count for t in self._loss.terms)
        shown = sum(parts)
        return {**result, "loss": shown} if is_mapping else shown

    def _counted_loss(self) -> Any:
        """Return the share of a counted loss in those of an optimizer's step, or None."""
        is_counted = isinstance(self._loss, Counted)
        return self._loss / self._trainer.accumulate_grad_batches if is_counted else None

    @contextmanager
    def _logging(self, log: Any) -> Iterator[None]:
        """Put a function in the place of `self.log` of the module, in this context."""
        module = self.lightning_module
        module.log, self.is_distributed = log, self.world_size > 1
        try:
            yield
        finally:
            self.is_distributed = False
            del module.log

    def _log_of_rows(self, log: Any, batch: Any, name: str, value: Any, **options: Any) -> None:
        """Log the mean over the global batch of a value of this rank's rows. Collective."""
        is_mean = options.get("reduce_fx", "mean") == "mean"
        if not is_mean or not isinstance(value, Tensor | int | float):
            log(name, value, **options | {"sync_dist": True})
            return
        share = getattr(self._loader, "share", None)
        rows = share.rows if share is not None else len(next(iter(tensors_in(batch))))
        total, count = self.run.mesh.sum_of_host_numbers(
            [float(torch.as_tensor(value).detach()) * rows, rows]
        )
        log(name, total / count, **options | {"batch_size": int(count), "sync_dist": True})

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().predict_step, *args, **kwargs)

    def _evaluation_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a step of an evaluation, which every rank makes with all samples. Collective."""
        module = self.lightning_module
        if self._prepared is None:
            return step(*args, **kwargs)
        if self.run.mesh.pipeline.size == 1:
            with self._logging(partial(module.log, sync_dist=True)):
                return self.run.call(step, *args, **kwargs)

        def keep_logged(*args: Any, **kwargs: Any) -> Any:
            kept: dict[str, Any] = {}
            with self._logging(partial(_keep, kept)):
                return step(*args, **kwargs), kept

        result, logged = self.run.call(keep_logged, *args, **kwargs)
        for name, (value, options) in logged.items():
            module.log(name, value, sync_dist=True, **options)
        return result

    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the gradients, then take the step. Collective.

        Raises: UsageError: the optimizer wants to compute several losses in a step.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS computes several losses in one step. Use another optimizer.")
        result = closure()  # before the step: hooks of strategies there look at the gradients
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Leave the gradients of the global batch in `.grad`. Collective."""
        is_manual = not self.lightning_module.automatic_optimization
        # Lightning divides by the batches that it accumulates, by 1 too. In the graph of a sum over
        # one sample, that could be the number of its samples.
        is_divided = is_manual or self._trainer.accumulate_grad_batches > 1
        counted = None if is_manual else self._counted_loss()
        loss = self.run.backward(counted or (closure_loss if is_divided else self._loss))
        self.precision_plugin.post_backward(loss, self.lightning_module)
        return loss

    def _closure_of_stages(self, automatic: Any, kwargs: Any, optimizer: Any, number: int) -> Any:
        """Return the closure of a step whose loss is a function, which every stage calls.

        Args:
            automatic: Lightning's loop of such closures.
            kwargs: of `training_step`, the batch first.
            number: of the batch.
        """
        first, *_ = kwargs
        module = self.lightning_module

        def compute_loss(batch: Any) -> Any:
            kept: dict[str, Any] = {}
            with self._logging(partial(_keep, kept)):
                result = automatic._training_step({**kwargs, first: batch})
            rows = torch.tensor(float(len(next(iter(tensors_in(batch))))))
            logged = {name: (summed(value * rows), known) for name, (value, known) in kept.items()}
            return self._counted_loss() or result.closure_loss, {
                ROWS: summed(rows),
                "logged": logged,
            }

        def step() -> Any:
            if zero_gradients is not None:
                zero_gradients()
            loss, extra = self.run.forward_backward(compute_loss, kwargs[first])
            before, module._current_fx_name = module._current_fx_name, "training_step"
            for name, (total, options) in extra["logged"].items():
                options |= {"sync_dist": True, "batch_size": int(extra[ROWS])}
                module.log(name, total / extra[ROWS], **options)
            module._current_fx_name = before
            self.precision_plugin.post_backward(loss, module)
            return _automatic.ClosureResult(loss)

        zero_gradients = automatic._make_zero_grad_fn(number, optimizer)
        return _automatic.Closure(step)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if len(self.optimizers) == 1:
            self.run.clip_gradients(clip_val)
        else:
            self.run.clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _is_divided(self) -> bool:
        """Return True where ranks have different samples, so that their metrics are parts."""
        return self.world_size > 1 and not self._trainer.evaluating

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum over ranks; of an evaluation, which all ranks make, its value."""
        if not isinstance(tensor, Tensor) or not self._is_divided():
            return tensor
        names: dict[Any, Any] = {"avg": "mean", None: "mean"}
        op = getattr(reduce_op, "name", reduce_op)
        op = op.lower() if isinstance(op, str) else op
        op = names.get(op, op)
        whole = tensor if tensor.is_floating_point() or op != "mean" else tensor.float()
        return shoal.all_reduce(whole.detach(), op=op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, (ranks, ...).

        Raises: UsageError: with gradients, which `self.trainer.strategy.run.gather` has.
        """
        if sync_grads and tensor.requires_grad:
            raise UsageError(
                "all_gather(sync_grads=True): no gradient flows through it here. Use "
                "self.trainer.strategy.run.gather(tensor)."
            )
        return shoal.all_gather(tensor.detach().unsqueeze(0))

    def barrier(self, name: str | None = None) -> None:
        self._is_training_loader = name == TRAINING_LOADER
        shoal.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank `src` on every rank, of JSON's kinds; a path is its text.

        Collective. Raises: UsageError: another kind of value, which only pickle could send.
        """
        if self.world_size == 1:
            return obj
        try:
            text = json.dumps(obj, default=os.fspath) if self.global_rank == src else ""
        except TypeError:
            text = f"?{type(obj).__name__}"
        text = self.run.mesh.all_gather_str(text)[src]
        if text.startswith("?"):
            raise UsageError(
                f"broadcast of a {text[1:]}: ranks send numbers, texts, lists and dicts of them, "
                "and no pickles. Make it of these; or send tensors by shoal.broadcast."
            )
        return json.loads(text)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = int(shoal.all_reduce(torch.tensor(int(decision)), op="sum"))
        return votes == self.world_size if all else votes > 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the whole model. Collective."""
        if self._prepared is None:
            return dict(self.lightning_module.state_dict())
        return self.run.weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: the state of the run has it."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of Lightning, and the state of the run beside it. Collective."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            self._remove_state(filepath)
            self.barrier()
            self._state_beside(filepath).save(checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: Any = None) -> Any:
        self._checkpoint_path = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, of which each rank keeps its part. Collective."""
        is_prepared = self._prepared is self.lightning_module
        with self.run.edit() if is_prepared else nullcontext():
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the run beside the checkpoint that was loaded last. Collective.

        Raises: CheckpointError: there is none: another strategy has written the checkpoint.
        """
        path = self._checkpoint_path
        state = Path(f"{path}{STATE}")
        if path is None or not state.is_dir():
            raise CheckpointError(
                f"{state} is missing: another strategy than ShoalStrategy has written this "
                "checkpoint. Its weights can be loaded by load_from_checkpoint; its optimizers "
                "cannot."
            )
        self._state_beside(path).resume()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self._remove_state(filepath)

    def _state_beside(self, path: str | Path) -> RunCheckpoints:
        return self.run.checkpoint(f"{path}{STATE}", keep=1)

    def _remove_state(self, path: str | Path) -> None:
        if self.is_global_zero:
            shutil.rmtree(f"{path}{STATE}", ignore_errors=True)

    def teardown(self) -> None:
        """Leave tensors where they are: ranks share them."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _keep(logged: dict[str, Any], name: str, value: Any, **options: Any) -> None:
    """Keep what a stage logs, so that all ranks log it after the call.

    Raises: UsageError: the option of `self.log` is none of a mean.
    """
    known = {key: int(options.pop(key)) for key in FLAGS if options.get(key) is not None}
    if options.pop("reduce_fx", "mean") != "mean" or options.keys() - IGNORED:
        raise UsageError(
            f"self.log({name!r}): under a pipeline, steps log means of numbers, with "
            f"{', '.join(FLAGS)}. Leave {', '.join(options) or 'reduce_fx'} out."
        )
    logged[name] = torch.as_tensor(value).detach(), known


def _last_seed() -> int | None:
    """Return the seed of Lightning's `seed_everything`; None if it was not called."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else None
