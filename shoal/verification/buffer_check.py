"""Buffers that training changes, such as running statistics: where ranks may differ, and what that
excuses.

A forward pass that updates a buffer sees the samples of its own rank only. So ranks come to hold
different values, and rank 0's are saved and evaluated: a difference by design, of that buffer. It
reaches gradients and weights only where training also reads what it wrote; the reference tries that
out. BatchNorm has a note of its own, said before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import BatchNormBase


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those of its `state_dict`; as they are, no copies."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The values of `saved_buffers` at this moment."""
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(model).items()}


def changed(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Buffers that are not what they were, but for BatchNorm's."""
    normalising = {
        path for path, module in model.named_modules() if isinstance(module, BatchNormBase)
    }
    now = saved_buffers(model)
    others = (name for name in before if name.rpartition(".")[0] not in normalising)
    return [name for name in others if not torch.equal(before[name], now[name])]


def are_read(model: nn.Module, before: Mapping[str, Tensor], loss_of: Callable[[], Tensor]) -> bool:
    """Whether a loss in training depends on how buffers have changed since `before`. It changes
    them once more.
    """
    random = torch.get_rng_state()
    losses = []
    for values in (copied(model), before):
        for name, buffer in saved_buffers(model).items():
            buffer.data.copy_(values[name])
        torch.set_rng_state(random)
        with torch.no_grad():
            losses.append(loss_of())
    return not torch.equal(*losses)


def note(names: Iterable[str]) -> str:
    """Why these differ."""
    first, *others = names
    more = f" and {len(others)} more" if others else ""
    return (
        f"{first}{more}: the forward pass updates it from the samples that one rank computes at "
        "once, and rank 0's "
        "value is evaluated and saved, so it differs from one device by design."
    )
