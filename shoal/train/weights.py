"""Initial weights from a torch file or safetensors files. Only tensors are read from them."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, UsageError
from shoal.weights import weight_files


def load_weights(model: nn.Module, file: str, name: str) -> list[str]:
    """Load the weights in `file` into `model`, one tensor at a time from safetensors.

    Args:
        file: of torch.save, or a path as `shoal.load_weights` takes it.
        name: of the model, for errors.

    Returns: sentences about tensors that were rounded, because the file has a wider floating-point
        dtype than the model.
    Raises:
        ConfigError: the file does not exist, holds other things than weights, or holds the weights
            of another model. All differences are named at once.
    """
    path = Path(file)
    if not path.exists():
        raise ConfigError([f"model.weights: there is no file {path}"])
    if path.is_dir() or path.suffix == ".safetensors":
        return _load_safetensors(model, path, name)
    return _load_torch(model, path, name)


def _load_safetensors(model: nn.Module, path: Path, name: str) -> list[str]:
    try:
        dtypes = {key: form.dtype for key, form in weight_files.stored_forms(path).items()}
        weight_files.load_weights(model, path)
    except UsageError as error:
        raise ConfigError([f"model.weights: {error}"]) from error
    return _check_dtypes(model.state_dict(), dtypes, path, name)


def _load_torch(model: nn.Module, path: Path, name: str) -> list[str]:
    content = _read_torch(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, Mapping):
        raise ConfigError(
            [f"model.weights: {path} holds a {type(state).__name__}, and no state dict of {name}"]
        )
    if state and all(str(key).startswith("module.") for key in state):
        # Saved from inside of DistributedDataParallel, as many training programs do.
        state = {str(key).removeprefix("module."): value for key, value in state.items()}
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    notes = _check_dtypes(model.state_dict(), dtypes, path, name)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError([f"model.weights: {path} does not fit {name}: {error}"]) from error
    return notes


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
        raise ConfigError([f"model.weights: {path} {reason}. {cure}."]) from error
    except Exception as error:  # torch raises errors of any type for a damaged file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            [f"model.weights: {path} is damaged, or no torch file: {first}"]
        ) from error


def _check_dtypes(
    state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], path: Path, name: str
) -> list[str]:
    """Return a sentence for each pair of dtypes where the model's is the narrower one.

    Raises:
        ConfigError: one dtype is floating-point and the other is not.
    """
    pairs = {key: (dtype, state[key].dtype) for key, dtype in dtypes.items() if key in state}
    rounded = [pair for pair in pairs.values() if torch.promote_types(*pair) != pair[1]]
    problems = [
        f"model.weights: {key} is {a} in {path} and {b} in {name}"
        for key, (a, b) in pairs.items()
        if a.is_floating_point != b.is_floating_point
    ]
    if problems:
        raise ConfigError(problems)
    return [
        f"model.weights: {count} of {len(dtypes)} tensors are {a} in {path} and were rounded to {b}"
        for (a, b), count in Counter(rounded).items()
    ]


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
