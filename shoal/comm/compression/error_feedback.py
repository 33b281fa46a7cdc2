"""Error feedback: what a message leaves out is added to the next gradient of the same parameter.

gradient ──(+)──> encode ──> message
          ^          │
          └─ memory <┘    the residual
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def add_residual(gradient: Tensor, memory: Tensor | None) -> Tensor:
    """Add the residual of earlier messages to a gradient, in the dtype of `memory`."""
    assert memory is not None, "this compression keeps its error; give it a memory"
    assert memory.shape == gradient.shape, (
        f"memory of {memory.shape} for a gradient of {gradient.shape}"
    )
    assert torch.promote_types(memory.dtype, gradient.dtype) == memory.dtype, (
        f"{memory.dtype} cannot hold the error"
    )
    return memory + gradient


class ErrorFeedback:
    """One residual for each parameter: a draft during a step, and saved at its end.

    Args: prefix: of the names in a checkpoint.

    Attributes:
        saved: the tensors of the last step, by parameter name.
        drafts: those of this step, which a skipped step drops.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.saved: dict[str, Tensor] = {}
        self.drafts: dict[str, Tensor] = {}

    def keep(self, names: Collection[str]) -> None:
        """Save the drafts of these parameters, and drop all others."""
        self.saved |= {name: draft for name, draft in self.drafts.items() if name in names}
        self.drafts.clear()

    def rank_state_dict(self) -> dict[str, Tensor]:
        return {self.prefix + name: value for name, value in self.saved.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.drafts.clear()
        self.saved = {
            name.removeprefix(self.prefix): value.clone()
            for name, value in state.items()
            if name.startswith(self.prefix)
        }
