"""`ShoalTrainer`: the Trainer of transformers, with its steps under any strategy.

    run = shoal.init("zero3")                     before TrainingArguments
    trainer = ShoalTrainer(model=..., args=..., train_dataset=..., run=run)
    trainer.train()

To transformers and Accelerate the job is one process, so they divide no batch, wrap no model and
average no loss. Every rank reads whole batches, and Shoal gives it its rows:

    batch, the same on all ranks ──> run.share ──> run.forward_backward(compute_loss) ──> optimizer

`per_device_train_batch_size` is the global batch therefore: it does not change with the number of
ranks, and neither do the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.data.seeds import (
    GeneratorStates,
    load_random_state,
    preserve_rng_state,
    random_state,
)
from shoal.errors import CheckpointError, UsageError
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.run.run import Run
from shoal.run.run_checkpoints import RunCheckpoints
from shoal.run.startup_summary import spell_batch
from shoal.strategies.loss_terms import counted

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    raise UsageError(f"ShoalTrainer: {error}: pip install 'shoal[hf]'") from error

STATE = "shoal"
"""The folder of a checkpoint with the state of the run, in Shoal's own format."""
COLLATE_STATE = "shoal-collate.safetensors"
"""The file of a checkpoint with the generators that collate functions draw from."""

IGNORED_LABEL = -100
"""The label of a token that counts in no loss: `ignore_index` of torch's cross_entropy."""


class LabelCount(Tensor):
    """The number of labels of an optimizer step, which tells whether a loss has computed with it.

    The Trainer gives it to each model whose `forward` takes further keywords. One that divides by
    it returns a sum, one that does not a mean: the classifiers of transformers (5.24).

    Attributes: is_read: a function other than a copy was given it, or one of its copies.
    """

    _plain: Tensor
    _reads: list[Any]
    _COPIES: ClassVar = (Tensor.to, Tensor.float, Tensor.double, Tensor.clone, Tensor.detach)

    @classmethod
    def of(cls, count: Tensor, reads: list[Any] | None = None) -> LabelCount:
        """Return it for a tensor of one number. Args: reads: those of what it is a copy of."""
        made = count.as_subclass(cls)
        made._plain, made._reads = count, [] if reads is None else reads
        return made

    @property
    def is_read(self) -> bool:
        return bool(self._reads)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        args, kwargs = tree_map(
            lambda leaf: leaf._plain if isinstance(leaf, cls) else leaf, (args, kwargs or {})
        )
        result = func(*args, **kwargs)
        if func in cls._COPIES:
            return cls.of(result, found[0]._reads)
        if getattr(func, "__name__", "") not in ("__get__", "dim", "size"):  # not its values
            for count in found:
                count._reads.append(func)
        return result


class ShoalTrainer(Trainer):
    """A `transformers.Trainer` whose steps are those of a run.

    `compute_loss`, `compute_loss_func`, callbacks, schedules, logging, `save_model`, checkpoints
    and resuming are those of Trainer. Every rank evaluates all samples. A checkpoint has the whole
    model, as `from_pretrained` reads it, and the state of the run, which resumes under any strategy
    and on any number of ranks.

    Args:
        run: of `shoal.init`, made before the `TrainingArguments`.
        args, kwargs: of `Trainer`.

    Raises: UsageError: the arguments ask for what `shoal.init` decides, such as bf16, or for a loss
        that shares of a batch cannot compute.
    """

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        self.run = run
        self._is_prepared = False
        self._collate_state: GeneratorStates | None = None
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if isinstance(given, TrainingArguments):
            _check_arguments(given)
            if given.data_seed is None:
                given.data_seed = given.seed  # ranks must read the same batches
        state = PartialState()
        state.num_processes, state.distributed_type = 1, DistributedType.NO
        state.process_index, state.local_process_index = run.rank, run.local_rank
        super().__init__(*args, **kwargs)
        size = self.args.train_batch_size  # of the one process that Accelerate sees
        run.print(spell_batch(size, run.mesh.data.size, 1, of="data "))

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Prepare model and optimizer, and create the schedule. Collective."""
        if not self._is_prepared:  # Accelerate has wrapped the optimizer, and moved its state
            self._collate_state = GeneratorStates()
            self.run.prepare(self.model, self.optimizer.optimizer)
            self._is_prepared = True
        schedule: LRScheduler = super().create_scheduler(num_training_steps, optimizer)
        return schedule

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of whole batches, whose workers draw alike on all ranks."""
        state = PartialState()
        state.process_index = 0
        try:
            loader: DataLoader[Any] = super().get_train_dataloader()
        finally:
            state.process_index = self.run.rank
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of an optimizer step, and the number of their labels."""
        with self._alike_draws():
            return super().get_batch_samples(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all samples on this rank."""
        with self._alike_draws():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute one batch of an evaluation.

        A pipeline draws random numbers there, and one process does not.
        """
        with preserve_rng_state():
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _alike_draws(self) -> Iterator[None]:
        """Draw the numbers that one process draws, on all ranks.

        A collate function that masks tokens draws from the generators of dropout, which differ
        between ranks once the model is prepared.
        """
        if self._collate_state is None:
            yield
            return
        with preserve_rng_state():
            self._collate_state.restore()
            yield
            self._collate_state = GeneratorStates()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Leave the gradients of a whole batch in `.grad`. Collective.

        Args:
            inputs: of the whole batch, the same on all ranks.
            num_items_in_batch: labels that count in all batches of this optimizer step; None where
                the model's loss is the mean over the labels of its batch.

        Returns: the loss of the whole batch, a detached scalar.
        """
        model.train()
        whole = dict(self._prepare_inputs(inputs))
        labels = self._labels_of(whole)

        def compute_loss(**share: Tensor) -> Any:
            # Before the loss, which may take the labels out of the batch.
            count = self._labels_of(share)
            items = num_items_in_batch
            if items is not None and count is not None:
                items = LabelCount.of(torch.as_tensor(items))
            loss = self.compute_loss(model, share, num_items_in_batch=items)
            is_read = isinstance(items, LabelCount) and items.is_read
            if not (is_read or self._is_sum_over_steps(items)):
                loss = loss / self.current_gradient_accumulation_steps
            if count is None:
                return loss
            # A sum over labels, divided by those of the optimizer step; or a mean over labels.
            return counted(loss * (labels if is_read else count), count)

        loss: Tensor = self.run.forward_backward(compute_loss, **self.run.share(whole))
        return loss

    def _is_sum_over_steps(self, num_items_in_batch: Any) -> bool:
        """Return True if the Trainer adds up the losses of an optimizer step as they are."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        is_given = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(is_given or self.compute_loss_func is not None)

    def _labels_of(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the number of labels that count in a batch; None if its labels are no tensor."""
        count: Tensor | None = self._get_num_items_in_batch([batch], self.args.device)
        labels = batch.get("labels")
        # None too for a model that takes no count, and returns the mean over labels.
        if count is None and isinstance(labels, Tensor):
            return labels.ne(IGNORED_LABEL).sum()
        return count

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.run.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the whole model. Collective."""
        super()._save(output_dir, self.run.weights() if self._is_prepared else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the state of the run, and the schedule. Collective."""
        self._checkpoint_in(output_dir).save(self.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what `_save_optimizer_and_scheduler` has written. Collective.

        Raises: CheckpointError: a Trainer without Shoal has written the checkpoint.
        """
        if checkpoint is not None and not self._checkpoint_in(checkpoint).resume():
            raise CheckpointError(
                f"{checkpoint}/{STATE} is missing: a Trainer without Shoal has written this "
                "checkpoint. Its weights can be loaded by from_pretrained; its optimizer cannot."
            )

    def _checkpoint_in(self, folder: str) -> RunCheckpoints:
        return self.run.checkpoint(Path(folder) / STATE, scheduler=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the generators of collate functions. The run's state has those of each rank."""
        with self._alike_draws():
            state = random_state(torch.device("cpu"))
        if self.args.should_save:
            save_file(state, Path(output_dir) / COLLATE_STATE)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load what `_save_rng_state` has written.

        Raises: CheckpointError: it is gone.
        """
        if checkpoint is None:
            return
        path = Path(checkpoint) / COLLATE_STATE
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: a resumed run would draw other numbers in its collate "
                "function. Copy it from where the checkpoint was saved, or resume from another one."
            )
        with preserve_rng_state():
            load_random_state(load_file(path), torch.device("cpu"))
            self._collate_state = GeneratorStates()


def _check_arguments(args: TrainingArguments) -> None:
    """Raise UsageError about settings that `shoal.init` decides, or that no share can compute."""
    wrong = [
        f"{name}=True belongs into shoal.init({cure})"
        for name, cure in (
            ("bf16", 'precision="bf16"'),
            ("fp16", 'precision="fp16"'),
            ("torch_compile", "compile=True"),
        )
        if getattr(args, name)
    ]
    if args.gradient_checkpointing:
        wrong.append('gradient_checkpointing=True is shoal.init("recompute,...")')
    if args.fsdp or args.deepspeed:
        wrong.append('remove fsdp and deepspeed, and write shoal.init("zero3")')
    if args.label_smoothing_factor:
        wrong.append(
            "label_smoothing_factor takes the mean over each share of a batch. Give the loss as "
            "compute_loss_func: F.cross_entropy(logits, labels, reduction='sum', "
            "label_smoothing=0.1) / num_items_in_batch"
        )
    if wrong:
        raise UsageError(f"ShoalTrainer: {'; '.join(wrong)}.")
