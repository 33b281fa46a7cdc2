"""Weights in safetensors files: one file, or a directory as transformers and Shoal write it.

llama/model.safetensors.index.json      name of a tensor -> file
llama/model-00001-of-00030.safetensors
llama/model-00002-of-00030.safetensors ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.weights.deferred_init import EmptyTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorForm(NamedTuple):
    """The form of a stored tensor.

    Attributes: read: returns its values on the CPU. Raises UsageError: the file is damaged.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Give a model the weights in safetensors files.

    Parameters with memory get their values at once. Of those that `shoal.empty_weights()` has made
    the file is noted, and `run.prepare` reads it layer by layer. Values are converted to the dtype
    of the model.

    Args:
        path: a file, or a directory with model.safetensors or model.safetensors.index.json.
        strict: every parameter and every saved buffer of the model must be there, and nothing
            else. False leaves the others as they are.

    Raises: UsageError: a file is missing or damaged, or differs from the model; it has all of that.
    """
    fill(model, stored_forms(Path(path)), path, strict)


def fill(
    model: nn.Module, forms: Mapping[str, TensorForm], path: str | Path, strict: bool = True
) -> None:
    """Give a model stored weights, as `load_weights`. Args: path: of the files, for errors."""
    state = dict(_tensors(model))
    problems = list(_differences(state, forms, strict))
    if problems:
        raise UsageError(f"{path} does not fit the model:\n  " + "\n  ".join(problems))
    for name, tensor in state.items():
        if name not in forms:
            continue
        if isinstance(tensor, EmptyTensor):
            tensor.calls.overwrite(tensor.form, forms[name].read)
        else:
            with torch.no_grad():
                tensor.copy_(forms[name].read())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what `state_dict` has, by the objects that modules hold."""
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor):
            yield name, tensor


def _differences(
    state: Mapping[str, Tensor], forms: Mapping[str, TensorForm], strict: bool
) -> Iterator[str]:
    """Yield how files and model differ."""
    # Of a tied weight, files have one name.
    there = {id(tensor) for name, tensor in state.items() if name in forms}
    if strict:
        lacking = [name for name, tensor in state.items() if id(tensor) not in there]
        # Old files, such as torchvision's first ResNets, have no counters; torch takes them too.
        lacking = [name for name in lacking if not name.endswith("num_batches_tracked")]
        yield from (f"{name} is not in the file" for name in lacking)
        yield from (f"the model has no {name}" for name in forms if name not in state)
    elif not there:
        yield "no name is the same"
    for name, tensor in state.items():
        form = forms.get(name)
        if form is None:
            continue
        if form.shape != tuple(tensor.shape):
            yield f"{name} has shape {form.shape}; the model's has {tuple(tensor.shape)}"
        elif form.dtype.is_floating_point != tensor.dtype.is_floating_point:
            yield f"{name} is {form.dtype}; the model's is {tensor.dtype}"


def stored_forms(path: Path) -> dict[str, TensorForm]:
    """Return the forms of all tensors at a path by name. Only headers are read.

    Raises: UsageError: a file is missing or damaged.
    """
    forms = {}
    for file in sorted(_files(path)):
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                place = opened.get_slice(name)
                # Mapped: no values are read.
                dtype = opened.get_tensor(name).dtype
                forms[name] = TensorForm(
                    tuple(place.get_shape()), dtype, partial(_read, file, name)
                )
    return forms


def _read(file: Path, name: str) -> Tensor:
    with _opened(file) as opened:
        values: Tensor = opened.get_tensor(name)
        return values


def _files(path: Path) -> set[Path]:
    """Return the files of a directory, or the one that `path` is.

    Raises: UsageError: there is none, or the index is damaged.
    """
    if not path.is_dir():
        return {path}
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise UsageError(f"{path} has neither {SINGLE} nor {INDEX}.")
        return {path / SINGLE}
    try:
        by_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in by_name.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is no index of weights: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UsageError(f"{index} names {outside[0]}, outside of its directory.")
    return {path / name for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{file} cannot be read: {reason}.") from error
