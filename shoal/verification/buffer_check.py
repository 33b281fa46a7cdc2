"""Buffers that training changes, such as running statistics.

A forward pass that updates a buffer sees only the samples of its own rank. So the ranks have
different values, and those of rank 0 are evaluated and saved. This is a difference by design of
that buffer. Gradients and weights may differ for this reason only if training also reads the
buffer, and `training_reads` finds that out with the reference model.

BatchNorm has a note of its own, which the run prints before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import BatchNormBase


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are in the model's `state_dict`; the tensors themselves."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of `saved_buffers`."""
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(model).items()}


def changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers that differ from `before`, except those of BatchNorm."""
    batchnorms = {
        path for path, module in model.named_modules() if isinstance(module, BatchNormBase)
    }
    buffers = saved_buffers(model)
    return [
        name
        for name, value in before.items()
        if name.rpartition(".")[0] not in batchnorms and not torch.equal(value, buffers[name])
    ]


def training_reads(
    model: nn.Module, before: Mapping[str, Tensor], loss_of: Callable[[], Tensor]
) -> bool:
    """Return True if the loss depends on how the buffers have changed since `before`.

    It computes the loss with both sets of buffers and the same random numbers. The buffers of
    `model` change once more by that.
    """
    random_state = torch.get_rng_state()
    losses = []
    for values in (copy_buffers(model), before):
        for name, buffer in saved_buffers(model).items():
            buffer.data.copy_(values[name])
        torch.set_rng_state(random_state)
        with torch.no_grad():
            losses.append(loss_of())
    return not torch.equal(*losses)


def note(names: Iterable[str]) -> str:
    """Return a sentence that explains why these buffers differ."""
    first, *others = names
    more = f" and {len(others)} more" if others else ""
    return (
        f"{first}{more}: the forward pass updates it from the samples that one rank computes at "
        "once, and rank 0's value is evaluated and saved, so it differs from one device by design."
    )
