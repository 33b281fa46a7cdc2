"""From a job to what a training loop needs: data, model, task and loaders.

`--plugin FILE` adds the user's own models and data sets, in dicts of a Python file:

    models = {"my_net": MyNet}      # called as MyNet(num_classes=..., input_shape=..., **options)
    data = {"my_data": load}        # called as load(config.data, seed) -> shoal.data.source.Source
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal import data, models
from shoal.config.job import Job
from shoal.data.loader import DistributedBatchLoader
from shoal.data.mixing import Mixed
from shoal.data.source import Source
from shoal.errors import ConfigError, UsageError
from shoal.run import Run, init_with_place
from shoal.strategies.base import ComputeLoss
from shoal.train.optimizer import scaled_rate, set_learning_rate
from shoal.train.task import Task
from shoal.weights import empty_weights, weight_files
from shoal.weights.weight_files import TensorForm

Registered = dict[str, dict[str, Callable[..., Any]]]
"""Models and data sets of a user's files by name, as `models` and `data`."""


@dataclass(frozen=True)
class Components:
    """All that a job describes, on this rank's device and before any strategy."""

    source: Source
    task: Task
    model: nn.Module
    train_loader: DataLoader
    validation_loader: DataLoader
    notes: list[str]
    """Sentences about weights that were rounded when they were loaded."""


def init_run(job: Job, announce: Callable[[str], None]) -> Run:
    """Join the other ranks of `job`, and set what is the same for all of this process. Collective.

    Args:
        announce: is called with each line of the startup summary, on rank 0 only.
    """
    if job.train.deterministic:
        # Without this variable cuBLAS refuses to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run = init_with_place(
        job.strategy,
        seed=job.seed,
        accumulate=job.train.accumulate,
        precision=job.train.precision,
        compile=job.model.compile,
        sync_batchnorm=job.model.sync_batchnorm,
        draws=job.train.draws,
        nonfinite=job.train.nonfinite,
        max_nonfinite=job.train.max_nonfinite,
        trace=job.log.trace,
        trace_to=job.directory,
        announce=announce,
    )
    torch.use_deterministic_algorithms(job.train.deterministic)
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    return run


def build(job: Job, device: torch.device) -> Components:
    """Build everything that `job` describes. Nothing is written or trained.

    Raises:
        ConfigError: a setting does not go with the model, the data or this machine.
        DataError: the data cannot be read.
    """
    registered = load_plugins(job.plugins)
    source = data.load(job.data, job.seed, registered["data"])
    dataset: Any = source.train
    if job.train.mixup or job.train.cutmix:
        if source.task == "language":
            raise ConfigError(
                f"train.mixup, train.cutmix: {job.data.name} is text; only images can be mixed."
            )
        dataset = Mixed(dataset, source.num_classes, job.train.mixup, job.train.cutmix)
    task = Task(source.task, source.num_classes, job.evaluation.topk, job.train.label_smoothing)
    with empty_weights() if job.model.empty else nullcontext():
        model = build_model(job, source, registered)
    if job.train.precision == "fp64":
        model = model.double()  # before it gets weights, which may be float64 too
    notes = []
    if job.model.weights is not None:
        notes = load_weights(model, job.model.weights)
    if job.model.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_forward_pre_hook(partial(_as_input, job))
    workers = _worker_arguments(job)
    train = DataLoader(
        dataset, job.train.batch_size, shuffle=True, drop_last=job.train.drop_last, **workers
    )
    validation = DataLoader(source.validation, job.evaluation.batch_size, **workers)
    return Components(source, task, model.to(device), train, validation, notes)


def build_model(job: Job, source: Source, registered: Registered) -> nn.Module:
    """Return the model that a job describes, for these data, with weights of its own."""
    return models.build(
        job.model.name,
        source.num_classes,
        source.input_shape,
        job.model.options,
        registered["models"],
    )


def describe(job: Job, built: Components, device: torch.device, total_steps: int) -> list[str]:
    """Return lines about model, data and settings, for the beginning of a run."""
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    num_train = len(built.source.train)  # type: ignore[arg-type]
    num_validation = len(built.source.validation)  # type: ignore[arg-type]
    rate = scaled_rate(job.optimizer, job.train.batch_size)
    lines = [
        f"{job.model.name}, {num_parameters:,} parameters, on {job.data.name}: {num_train:,} "
        f"samples, {num_validation:,} to validate",
        f"{job.strategy}, {device.type}, {job.train.precision}; {job.optimizer.name}, learning "
        f"rate {rate:g}; {total_steps:,} steps in {Path(job.directory)}",
    ]
    if job.train.soft_targets:
        lines.append(f"training loss with {job.train.soft_targets}, validation loss without")
    return lines


def steps_of_epochs(job: Job, loader: DistributedBatchLoader) -> list[int]:
    """Return the optimizer steps of each epoch. Raise ConfigError if an epoch has none."""
    steps = [loader.batches_in(epoch) for epoch in range(job.train.epochs)]
    if 0 in steps:
        raise ConfigError(
            f"train.batch_size: {job.train.batch_size} is more than the data set holds, and "
            "train.drop_last leaves the rest out. Use a smaller batch, or "
            "train.drop_last=false."
        )
    return steps


def take_step(
    job: Job,
    run: Run,
    optimizer: Optimizer,
    compute_loss: ComputeLoss,
    batch: Any,
    factor: float,
) -> float:
    """Train on a batch, at a factor of the base rate. Collective. Return the learning rate."""
    inputs, target = batch
    rate = set_learning_rate(optimizer, factor)
    optimizer.zero_grad()
    run.forward_backward(compute_loss, inputs, target)
    if job.train.clip_norm is not None:
        run.clip_gradients(job.train.clip_norm)
    optimizer.step()
    return rate


def _as_input(job: Job, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return inputs in the dtype and memory format of the model. Runs before each forward pass."""
    if job.train.precision == "fp64":
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    if job.model.channels_last:
        inputs = tuple(
            x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
        )
    return inputs


def _worker_arguments(job: Job) -> dict[str, Any]:
    workers = job.data.workers
    return {
        "num_workers": workers,
        # A new interpreter could not import a data set of a --plugin file by name. A fork has
        # it already.
        "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
        "persistent_workers": workers > 0,
        "pin_memory": job.data.pin_memory and torch.cuda.is_available(),
    }


def load_plugins(files: Iterable[str]) -> Registered:
    """Run the files, which `job_precheck` has seen, and collect their `models` and `data`.

    Raises:
        ConfigError: a file does not exist, or imports what is not installed.
    """
    registered: Registered = {"models": {}, "data": {}}
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"--plugin {name}: there is no such file")
        # The prefix keeps a file from hiding a library's module of the same name.
        spec = importlib.util.spec_from_file_location(f"shoal_plugin_{Path(name).stem}", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise ConfigError(f"--plugin {name}: {error}") from error
        for kind, found in registered.items():
            found.update(getattr(module, kind, {}))
    return registered


def load_weights(model: nn.Module, file: str) -> list[str]:
    """Load the weights in `file` into `model`, one tensor at a time from safetensors.

    Args: file: of torch.save, or a path as `shoal.load_weights` takes it.

    Returns: sentences about tensors that were rounded, because the file has a wider floating-point
        dtype than the model.
    Raises:
        ConfigError: the file does not exist, holds other things than weights, or holds the weights
            of another model. All differences are named at once.
    """
    path = Path(file)
    is_torch = path.is_file() and path.suffix != ".safetensors"
    try:
        forms = _torch_forms(path) if is_torch else weight_files.stored_forms(path)
        weight_files.fill(model, forms, path)
    except UsageError as error:
        raise ConfigError(f"model.weights: {error}") from error
    state = model.state_dict()
    pairs = [(form.dtype, state[name].dtype) for name, form in forms.items()]
    rounded = Counter(pair for pair in pairs if torch.promote_types(*pair) != pair[1])
    return [
        f"model.weights: {count} of {len(pairs)} tensors are {a} in {path} and were rounded to {b}"
        for (a, b), count in rounded.items()
    ]


def _torch_forms(path: Path) -> dict[str, TensorForm]:
    """Return the tensors of a state dict, which a file of torch.save is or has as `state_dict`."""
    content = _read_torch(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    others = [state] if not isinstance(state, Mapping) else state.values()
    if wrong := [type(other).__name__ for other in others if not isinstance(other, Tensor)]:
        raise UsageError(f"{path} holds a {wrong[0]}; a state dict has tensors alone")
    if all(str(key).startswith("module.") for key in state):
        # Saved from inside of DistributedDataParallel, as many training programs do.
        state = {str(key).removeprefix("module."): value for key, value in state.items()}
    return {
        str(key): TensorForm(tuple(value.shape), value.dtype, partial(Tensor.detach, value))
        for key, value in state.items()
    }


def _read_torch(path: Path) -> Any:
    """Return the contents of a file of torch.save: tensors and numbers in dicts and lists, nothing
    else.
    """
    try:
        with numbers_of_numpy():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch advises weights_only=False here, which would run any code in the file.
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match:
            reason = f"holds {match[1]}, and tensors alone are read"
            cure = "Save what model.state_dict() gives"
        else:
            reason = "is not a torch or safetensors file"
            cure = "Give a file that torch.save or `shoal export` wrote"
        raise UsageError(f"{path} {reason}. {cure}.") from error
    except Exception as error:  # torch raises errors of any type for a damaged file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path} is damaged, or no torch file: {first}") from error


def numbers_of_numpy() -> AbstractContextManager[None]:
    """Let `torch.load(weights_only=True)` read single numbers of NumPy in this context.

    A learning rate that NumPy has computed is saved as one, in the optimizer's state beside the
    weights. Arrays, texts and dates are refused as before.
    """
    scalar = np.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")  # NumPy 1 and 2
    kinds = {type(np.dtype(letter)) for letter in "?bhilqBHILQefd"}
    allowed: list[Any] = [*((scalar, name) for name in names), np.dtype, *kinds]
    context: AbstractContextManager[None] = torch.serialization.safe_globals(allowed)
    return context
