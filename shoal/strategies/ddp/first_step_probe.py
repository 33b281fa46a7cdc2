"""Probe of the first step: which parameters get a gradient, and if buffers change."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from shoal.strategies.buffer_versions import changed_since, snapshot


class FirstStepProbe:
    """Watches the trainable parameters of `watched` and the buffers of `module`, until `result`."""

    def __init__(self, watched: nn.Module, module: nn.Module) -> None:
        self.parameters = [p for p in watched.parameters() if p.requires_grad]
        self._module = module
        self._before = snapshot(module)
        self._used = [0] * len(self.parameters)
        numbered = enumerate(self.parameters)
        self._hooks = [p.register_hook(partial(self._on_gradient, index)) for index, p in numbered]

    def result(self) -> tuple[list[int], int]:
        """Return 1 or 0 for each parameter, used or not, and for buffers. It ends the probe."""
        for hook in self._hooks:
            hook.remove()
        changes = changed_since(self._module, self._before)
        return self._used, int(any(changes.values()))

    def _on_gradient(self, index: int, _: Tensor) -> None:
        self._used[index] = 1
