"""Lets a script that means float32 compute in float64, without a change of the script.

    nn.Linear(4, 4)                     float64, for that is the default now
    module with float32 parameters      promoted when they are registered
    torch.from_numpy(float32) + w       promoted when a function of torch gets it
    x.float(), x.to(torch.float32)      float64, also where a mode of Shoal's passes them on

Autocast leaves float64 as it is, so a script with autocast computes in float64 as well.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shoal.platform.script_line import caller
from shoal.trial.float64_functions import Float64Functions, promoted
from shoal.verification.script.watched_calls import watch

_SHOAL = f"{Path(__file__).parents[2]}/"
_SCALER = torch.amp.grad_scaler.__file__


class Float64Everywhere(Float64Functions):
    """Inside, each float32 tensor that a function of torch gets from the script is float64.

    Shoal's own calls are left as they are, for its messages have dtypes of their own, and so are
    those of a GradScaler.
    """

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for register in (
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
        ):
            self._stack.callback(register(_promote_tensor).remove)
        watch(self._stack, nn.Module, "__call__", _call_with_promoted)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calling: FrameType | None = caller()
        # A GradScaler's kernel takes a scale in float32 only.
        is_left_alone = calling is not None and calling.f_code.co_filename == _SCALER
        if is_left_alone or _is_called_by_shoal(func, calling):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _is_called_by_shoal(func: Any, frame: FrameType | None) -> bool:
    """Return True for a call of Shoal's own; False for one of the script's that it passes on.

    A mode or a tensor subclass of Shoal's that stands above gets each function first, as `func` of
    its `__torch_function__`, and calls it from there.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_SHOAL):
        if frame.f_locals.get("func") is not func:
            return True
        frame = frame.f_back
    return False


def _promote_tensor(_module: nn.Module, _name: str, tensor: Any) -> None:
    if _is_float32(tensor):
        tensor.data = tensor.data.double()


def _call_with_promoted(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if any(_is_float32(value) for value in (*args, *kwargs.values())):
        args, kwargs = promoted(args), promoted(kwargs)
    return original(module, *args, **kwargs)


def _is_float32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32
