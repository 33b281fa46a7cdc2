"""Weights to start from: a torch file or a safetensors file, of this very model. Nothing but
tensors is read.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.errors import ConfigError


def load_weights(model: nn.Module, file: str, name: str) -> list[str]:
    """Give `model` the weights in `file`; one tensor at a time from a .safetensors file.

    Returns: sentences about what was rounded, where the file has a wider floating-point dtype than
    the model.
    Raises: ConfigError: no such file, no file of weights alone, or not the weights of this model;
    names what differs."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError([f"model.weights: there is no file {path}"])
    if path.suffix == ".safetensors":
        return _load_safetensors(model, path, name)
    return _load_torch(model, path, name)


def _load_safetensors(model: nn.Module, path: Path, name: str) -> list[str]:
    own = model.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            there = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            _refuse_mismatch(own, there, path, name)
            notes = _rounded(
                own, {key: file.get_tensor(key).dtype for key in there}, path, name
            )  # mapped, not read
            with torch.no_grad():
                for key, tensor in own.items():
                    tensor.copy_(file.get_tensor(key))
            return notes
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            [f"model.weights: {path} is no whole safetensors file: {error}"]
        ) from error


def _load_torch(model: nn.Module, path: Path, name: str) -> list[str]:
    content = _read_torch(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, Mapping):
        raise ConfigError(
            [f"model.weights: {path} holds a {type(state).__name__}, and no state dict of {name}"]
        )
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    notes = _rounded(model.state_dict(), dtypes, path, name)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError([f"model.weights: {path} does not fit {name}: {error}"]) from error
    return notes


def _read_torch(path: Path) -> Any:
    """What is in a file of torch's, where that is tensors in dicts and lists and nothing else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch advises to load such a file with weights_only=False, which would run whatever is in
        # it.
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"holds {found[1]}, and tensors alone are read"
            if found
            else "is not a torch or safetensors file"
        )
        cure = (
            "Save what model.state_dict() gives"
            if found
            else "Give a file that torch.save or `shoal export` wrote"
        )
        raise ConfigError([f"model.weights: {path} {reason}. {cure}."]) from error
    except Exception as error:  # what a torn or altered file makes torch raise has no end of types
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            [f"model.weights: {path} is damaged, or no torch file: {first}"]
        ) from error


def _refuse_mismatch(
    own: Mapping[str, Tensor], there: Mapping[str, tuple[int, ...]], path: Path, name: str
) -> None:
    problems = [
        f"model.weights: {path} lacks {key}, which {name} has" for key in own if key not in there
    ]
    problems += [
        f"model.weights: {path} has {key}, which {name} lacks" for key in there if key not in own
    ]
    problems += [
        f"model.weights: {key} has shape {there[key]} in {path} and {tuple(tensor.shape)} in {name}"
        for key, tensor in own.items()
        if key in there and there[key] != tuple(tensor.shape)
    ]
    if problems:
        raise ConfigError(problems)


def _rounded(
    own: Mapping[str, Tensor], there: Mapping[str, torch.dtype], path: Path, name: str
) -> list[str]:
    """A sentence for each two dtypes of which the model's holds less. Raises ConfigError: they
    are not of one kind.
    """
    found = {key: (dtype, own[key].dtype) for key, dtype in there.items() if key in own}
    losing = {key: both for key, both in found.items() if torch.promote_types(*both) != both[1]}
    strange = {
        key: both
        for key, both in found.items()
        if both[0].is_floating_point != both[1].is_floating_point
    }
    problems = [
        f"model.weights: {key} is {a} in {path} and {b} in {name}"
        for key, (a, b) in strange.items()
    ]
    if problems:
        raise ConfigError(problems)
    return [
        f"model.weights: {count} of {len(there)} tensors are {a} in {path} and were rounded to {b}"
        for (a, b), count in Counter(losing.values()).items()
    ]
