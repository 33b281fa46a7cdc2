"""Complex parameters and compression: each way of it orders, rounds or factors real numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.errors import StrategyRefused


def refuse_complex(parameters: Mapping[str, Tensor], compress: str) -> None:
    """Raise StrategyRefused where gradients are complex: their imaginary parts would be lost on the way."""
    found = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if found:
        raise StrategyRefused(
            f"compress={compress} sends real numbers, and {', '.join(found)} is complex. Use compress=none, or keep "
            "torch.view_as_real(parameter) as the parameter."
        )
