"""Calls of a user's function that leave no trace: generators, models, gradients, the script.

with Untouched(models, compute_loss) as state:
    compute_loss(...)
    state.restore()          each pass begins where the training step would
    compute_loss(...)

Counters, meters, lists, tensors and generators of the script are found through the function: its
closure, the globals that it names, the object that it is a method of, and what these hold, a few
levels deep.
"""

from __future__ import annotations

import io
import operator
import random
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from shoal.data.own_generators import (
    GENERATOR_KINDS,
    generator_state,
    restore_generator,
)
from shoal.data.seeds import GeneratorStates, preserve_rng_state
from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.module_state import BatchNormBase, DropoutBase
from shoal.platform.torch_private.tensor_state import gradient_hooks, version
from shoal.strategies.module_snapshot import ModelSnapshot, trial_running, uncompiled
from shoal.strategies.pipeline.absent import AbsentTensor
from shoal.trial.loss_verdict import CannotTry

DEPTH = 4
LARGEST_COPY = 1 << 22
"""Numbers of the largest tensor that is copied. Larger ones are data sets and weights."""
LARGEST_WALK = 1000
"""Entries of the longest container whose entries are looked at."""
_LIBRARIES = (
    *(sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]),
    str(Path(__file__).parents[1]),
)
"""Folders whose functions keep no state of a script, Shoal's own among them."""
_OF_MACHINERY = ("torch", "shoal")
"""Packages whose objects, but for modules and tensors, belong to no script: a run, a scheduler."""
LEFT_ALONE = (
    *(type, ModuleType, str, bytes, int, float, complex, type(None)),
    *(Optimizer, DataLoader, Dataset, torch.dtype, torch.device, io.IOBase),
)
"""Classes of objects that hold no state of a loss, or whose state others keep."""


EVALUATED = (BatchNormBase, DropoutBase, nn.RNNBase, nn.MultiheadAttention)
"""Classes of layers that a trial evaluates."""


class SavedObjects:
    """Objects and what they held at the time of `save`; `restore` may be called many times.

    Args: keeps: False to find objects alone.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._restores: list[Callable[[], bool | None]] = []
        # Kept alive, so that an id stays the id of one object.
        self._seen: dict[int, Any] = {}

    def skip(self, values: Iterable[Any]) -> None:
        """Leave out objects that `save` would find."""
        self._seen.update((id(value), value) for value in values)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that were found."""
        return [value for value in self._seen.values() if isinstance(value, Tensor)]

    def restore(self) -> bool:
        """Put back what has changed since `save`; return True if anything had.

        Of arrays and generators it is not known whether they have.
        """
        with torch.no_grad():
            changes = [restore() for restore in self._restores]
        return any(changes)

    def save(self, value: Any, depth: int = DEPTH) -> None:
        """Save an object, and what it holds down to `depth` levels.

        Raises: CannotTry: an iterator, which cannot be turned back.
        """
        if depth < 0 or isinstance(value, LEFT_ALONE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._save_tensor(value)
        elif isinstance(value, np.ndarray):
            self._save_array(value)
        elif isinstance(value, GENERATOR_KINDS):
            self._save_generator(value)
        elif isinstance(value, nn.Module):
            for module in value.modules():
                self._seen[id(module)] = module
                self._save_dict(vars(module), depth=2)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._save_function(value, depth)
        elif isinstance(value, (dict, list, set, deque)):
            self._save_container(value, depth)
        elif isinstance(value, tuple):
            self._save_each(value, depth)
        elif is_of_machinery(value):
            return
        elif hasattr(value, "__next__"):
            self._save_iterator(value)
        elif hasattr(value, "__dict__"):
            self._save_dict(vars(value), depth)

    def _save_iterator(self, iterator: Any) -> None:
        if self._keeps:
            raise CannotTry(f"a {type(iterator).__name__}, which cannot be read again")

    def _save_tensor(self, tensor: Tensor) -> None:
        # An absent tensor, which a hook may have kept, has no memory.
        if isinstance(tensor, (DTensor, AbsentTensor)) or tensor.is_inference():
            return
        if tensor.numel() > LARGEST_COPY or not self._keeps:
            return
        values, before = tensor.detach().clone(), version(tensor)

        def restore() -> bool:
            nonlocal before
            has_changed = version(tensor) != before
            if has_changed:
                tensor.detach().copy_(values)
                before = version(tensor)
            return has_changed

        self._restores.append(restore)

    def _save_array(self, array: np.ndarray) -> None:
        if array.size <= LARGEST_COPY and array.flags.writeable and self._keeps:
            values = array.copy()
            self._restores.append(partial(np.copyto, array, values))

    def _save_generator(self, generator: Any) -> None:
        state = generator_state(generator)
        self._restores.append(partial(restore_generator, generator, state))

    def _save_container(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._save_dict(value, depth)
            return
        entries = list(value)

        def restore() -> bool:
            if len(value) == len(entries) and all(map(operator.is_, value, entries)):
                return False
            if isinstance(value, list):
                value[:] = entries
            else:
                value.clear()
                value.update(entries) if isinstance(value, set) else value.extend(entries)
            return True

        self._restores.append(restore)
        self._save_each(entries, depth)

    def _save_dict(self, value: dict[Any, Any], depth: int) -> None:
        entries = dict(value)

        def restore() -> bool:
            added = [key for key in value if key not in entries]
            changed = [key for key in entries if key not in value or value[key] is not entries[key]]
            for key in added:
                del value[key]
            for key in changed:
                value[key] = entries[key]
            return bool(added or changed)

        self._restores.append(restore)
        self._save_each(list(entries.values()), depth)

    def _save_each(self, entries: Any, depth: int) -> None:
        if len(entries) <= LARGEST_WALK:
            for entry in entries:
                self.save(entry, depth - 1)

    def _save_function(self, value: Any, depth: int) -> None:
        if isinstance(value, partial):
            self._save_each((value.func, *value.args, *value.keywords.values()), depth + 1)
        elif isinstance(value, MethodType):
            self.save(value.__self__, depth)
            self.save(value.__func__, depth)
        elif not is_of_library(value.__code__):
            self._save_each((value.__defaults__ or ()), depth)
            self._save_each([*(value.__kwdefaults__ or {}).values()], depth)
            for cell in value.__closure__ or ():
                self._save_cell(cell, depth)
            self._save_globals(value, depth)
        elif hasattr(value, "__wrapped__"):  # a function of the script, with one of ours around it
            self.save(value.__wrapped__, depth)

    def _save_cell(self, cell: CellType, depth: int) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        try:
            contents = cell.cell_contents
        except ValueError:  # Not assigned yet.
            return
        self._save_place(lambda: cell.cell_contents, partial(setattr, cell, "cell_contents"))
        self.save(contents, depth - 1)

    def _save_place(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Save what stands at a place that is read and written so."""
        entry = read()

        def restore() -> bool:
            has_changed = read() is not entry
            if has_changed:
                write(entry)
            return has_changed

        self._restores.append(restore)

    def _save_globals(self, function: FunctionType, depth: int) -> None:
        table = function.__globals__
        for name in sorted(set(global_names(function.__code__))):
            if name in table:
                self._save_place(partial(table.get, name), partial(table.__setitem__, name))
                self.save(table[name], depth - 1)


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside of it may look up as globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def tensors_of(function: Any) -> list[Tensor]:
    """Return the tensors that a function of a script can reach, as `SavedObjects` finds them."""
    objects = SavedObjects(keeps=False)
    objects.save(function)
    return objects.tensors()


def is_of_machinery(value: Any) -> bool:
    """Return True for an object of torch or Shoal, which holds no state of a script."""
    return type(value).__module__.split(".")[0] in _OF_MACHINERY


def is_of_library(code: CodeType) -> bool:
    """Return True for a function that keeps no state of a script."""
    return code.co_filename.startswith(_LIBRARIES) or "site-packages" in code.co_filename


def devices_of(models: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices on which the parameters of models lie."""
    return {parameter.device for model in models for parameter in model.parameters()}


@contextmanager
def leaving_no_trace(models: Sequence[nn.Module], function: Any, batch: Any) -> Iterator[bool]:
    """Put models, the script, its batch and generators back after passes that run as those of a
    step.

    Yields False if the script cannot be put back, as one that reads from an iterator.
    """
    given = [
        (tensor, tensor.detach().clone(), version(tensor))
        for tensor in tensors_in(batch)
        if not tensor.is_inference()
    ]
    snapshots = [ModelSnapshot(model) for model in models]
    objects, can_repeat = SavedObjects(), True
    objects.skip(module for model in models for module in model.modules())
    try:
        objects.save(function)
    except CannotTry:
        can_repeat = False
    try:
        with redirect_stdout(io.StringIO()), preserve_rng_state(devices_of(models)):
            yield can_repeat
    finally:
        objects.restore()
        for state in reversed(snapshots):
            state.restore()
        for tensor, values, before in given:
            if version(tensor) != before:
                tensor.detach().copy_(values)


class Untouched:
    """Save all that a call of `function` may change; put it back on `restore` and at the end.

    Layers of `EVALUATED` are in evaluation mode meanwhile: that BatchNorm mixes the samples of a
    batch is told elsewhere, and masks of dropout are no matter of samples. TensorFloat-32 is off,
    for its rounding depends on the split. Nothing is compiled. Hooks of gradients do not run, and
    nothing is printed.

    Args:
        models: the modules that the function calls.
        function: the user's function.

    Attributes: script_was_changed: a pass has changed what the function reaches beyond the models.
    """

    def __init__(self, models: Sequence[nn.Module], function: Any) -> None:
        self._models = list(models)
        self._function = function
        self._stack = ExitStack()
        self._seed: int | None = None
        self.script_was_changed = False

    def __enter__(self) -> Untouched:
        self._layers, self._script = SavedObjects(), SavedObjects()
        for model in self._models:
            self._layers.save(model)
            self._script.skip(model.modules())
        self._script.skip(self._layers.tensors())
        self._script.save(self._function)
        self._generators = GeneratorStates(devices_of(self._models))
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._grads = [parameter.grad for parameter in self._parameters]
        self._hooks = [dict(gradient_hooks(parameter)) for parameter in self._parameters]
        self._tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        self._stack.enter_context(trial_running())
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(redirect_stdout(io.StringIO()))
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        for parameter in self._parameters:
            gradient_hooks(parameter).clear()
        self._prepare_modules()
        return self

    def __exit__(self, *_: object) -> None:
        self._seed = None
        self._put_back()
        for parameter, hooks in zip(self._parameters, self._hooks, strict=True):
            gradient_hooks(parameter).update(hooks)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self._tf32
        self._stack.close()

    def restore(self, script: bool = True) -> None:
        """Put everything back, for the next pass.

        Args: script: False to leave what passes have changed beyond the models.
        """
        self._put_back(script)
        self._prepare_modules()

    def reseed(self, seed: int | None) -> None:
        """Let the following passes find Python's and NumPy's generators in another state.

        Args: seed: None for the state of the beginning.
        """
        self._seed = seed

    def _prepare_modules(self) -> None:
        for model in self._models:
            for module in model.modules():
                if isinstance(module, EVALUATED):
                    module.training = False

    def _put_back(self, script: bool = True) -> None:
        if script:
            self.script_was_changed |= self._script.restore()
        self._layers.restore()
        self._generators.restore()
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad
