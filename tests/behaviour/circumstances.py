"""Tell where bits can be compared: the same versions, and the same bits of plain PyTorch."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.testing import world

from . import models

DOUBLE, SINGLE = 1e-10, 1e-4
"""Relative tolerances where bits cannot be the same; SINGLE is a few steps of float32 rounding."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, shapes, dtypes and bytes of tensors, in the order of the names."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


@cache
def here() -> dict[str, str]:
    """The circumstances of this process, as they are recorded. A world of one rank is started."""
    (bits,) = world.run(1, _bits_of_one_device)
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "vector units": torch.backends.cpu.get_cpu_capability(),
        "bits of one device": bits,
    }


def same_bits(recorded: Mapping[str, Any]) -> bool:
    """Tell if a record with these circumstances can be asked for its bits here."""
    return dict(recorded) == here()


def _bits_of_one_device() -> str:
    """Plain PyTorch on whole batches, and on the shares that two and three ranks have of one."""
    torch.set_num_threads(1)
    found: dict[str, Tensor] = {}
    for model in models.MODELS:
        for dtype in (torch.float64, torch.float32):
            found |= {f"{model} {dtype} {key}": value for key, value in _trained(model, dtype)}
    return digest(found)


def _trained(model: str, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    torch.manual_seed(0)
    net, optimizer, loader = models.made(model, "AdamW", dtype)
    inputs, targets = loader.dataset[: models.BATCH]
    for share in (slice(None), slice(4), slice(3), slice(2)):
        optimizer.zero_grad()
        models.loss(net(inputs[share]), targets[share]).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            yield f"gradient {share.stop} {name}", parameter.grad.clone()
        optimizer.step()
    yield from net.state_dict().items()
