"""Settings by which one process computes as the ranks do: weights, learning rates, no dropout.

Dropout is off where ranks draw masks that one process cannot draw: wherever the loop itself calls
the model, without Shoal or before `run.backward`.

A script that means float32 computes in float64, without a change:

    nn.Linear(4, 4)                     float64, for that is the default now
    module with float32 parameters      promoted when they are registered
    torch.from_numpy(float32) + w       promoted when a function of torch gets it
    x.float(), x.to(torch.float32)      float64, also where a mode of Shoal's passes them on

Autocast leaves float64 as it is, so a script with autocast computes in float64 as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.platform.script_line import caller
from shoal.trial.float64_functions import Float64Functions, promoted
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import RankRecord, recorded
from shoal.verification.script.watched_calls import watch

_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_SHOAL = f"{Path(__file__).parents[2]}/"
_SCALER = torch.amp.grad_scaler.__file__
_NOTE = "dropout is off in both runs: these ranks cannot draw the masks of one device."


class SameStart:
    """Gives the models of one process the weights, and its optimizers the rates, of many ranks.

    Args:
        folder: of the record of the ranks.
        ranks: its indices.
        record: the index of this process, for notes.
    """

    def __init__(self, folder: Path, ranks: list[RankRecord], record: RankRecord) -> None:
        self._weights = recorded(folder, 0, "start")
        self._steps = {step.number: step for step in ranks[0].steps}
        self._record = record

    def load(self, names: ModelNames) -> None:
        """Copy the weights that rank 0 began with into the models."""
        differ = []
        with torch.no_grad():
            for name, parameter in names.parameters():
                if name in self._weights:
                    value = self._weights[name].to(parameter.dtype)
                    own = to_local(parameter)
                    if own.shape == value.shape and not torch.equal(own, value):
                        differ.append(name)
                        own.copy_(value)
        if differ:
            self._record.note(
                f"one process began with other weights than the ranks ({differ[0]} and "
                f"{len(differ) - 1} more), and was given theirs: the script's seed depends on "
                "the number of processes."
            )

    def set_rates(self, number: int, optimizer: Optimizer) -> None:
        """Give the groups of an optimizer the learning rates of the same step of the ranks."""
        step = self._steps.get(number)
        if step is None:
            return
        for group, settings in zip(optimizer.param_groups, step.settings, strict=False):
            rate = settings.get("lr")
            if rate is not None and float(group["lr"]) != rate:
                self._record.note(
                    f"the learning rate depends on the number of processes: {rate:g} on many, "
                    f"{float(group['lr']):g} on one, which was given that of many."
                )
                group["lr"] = rate


def turn_dropout_off(stack: ExitStack, record: RankRecord, stays_on: Callable[[], bool]) -> None:
    """Let functions of dropout return their input until the stack is closed.

    Args:
        record: of this rank; it gets a note.
        stays_on: returns True while the masks are those of one device.
    """

    def rate(p: float) -> float:
        if p <= 0 or stays_on():
            return p
        if not record.draws:
            record.note(_NOTE)
            record.draws = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
        return 0.0

    def dropout(
        original: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        return original(input, rate(p) if training else p, training, inplace)

    def attention(
        original: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> Any:
        return original(query, key, value, attn_mask, rate(dropout_p), *rest, **options)

    for name in _FUNCTIONS:
        watch(stack, torch.nn.functional, name, dropout)
    watch(stack, torch.nn.functional, "scaled_dot_product_attention", attention)


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
