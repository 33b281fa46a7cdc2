"""Initial weights from a torch file or safetensors files. Only tensors are read from them."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, UsageError
from shoal.weights import weight_files
from shoal.weights.weight_files import TensorForm


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
