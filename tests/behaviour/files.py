"""Where records lie, and how they are read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

RECORDED = Path(__file__).with_name("recorded")


def read(name: str) -> Any:
    """What stands in `recorded/NAME.json`."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def write(name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    (RECORDED / f"{name}.json").write_text(text + "\n")


def read_tensors(name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of each key of `recorded/NAME.safetensors`."""
    found: dict[str, dict[str, Tensor]] = {}
    for path, value in safetensors.torch.load_file(RECORDED / f"{name}.safetensors").items():
        key, _, inner = path.partition("|")
        found.setdefault(key, {})[inner] = value
    return found


def write_tensors(name: str, values: Mapping[str, Mapping[str, Tensor]]) -> None:
    flat = {
        f"{key}|{inner}": tensor.contiguous()
        for key, tensors in sorted(values.items())
        for inner, tensor in sorted(tensors.items())
    }
    safetensors.torch.save_file(flat, RECORDED / f"{name}.safetensors")
