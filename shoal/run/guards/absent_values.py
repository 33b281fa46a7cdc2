"""Values that this rank does not have: weights and gradients of other stages, servers' gradients.

mean.mul_(0.9).add_(parameter)     refused: many functions of torch would leave `mean` as it is
parameter.normal_()                refused: the generators of other ranks would go on
parameter.clamp_(-1, 1)            allowed: the rank that holds it does so. Servers do not
mask = parameter.abs() > 0.1       allowed: absent, too
parameter.mul_(mask)
p.grad.norm()                      absent, too; of servers' gradients refused at once
p.grad = None                      allowed: `removed_gradients`
parameter.device                   the device of this rank's weights, for `x.to(device)`

Nor do old parameters keep values that a script has held since before they were divided. A gradient
that is elsewhere would be None, and a loop that sums norms over `.grad` would leave it out in
silence; so a stand-in is shown there between steps.

`READABLE` are the attributes of a tensor that tell nothing of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.draws import FILLING_FUNCTIONS
from shoal.errors import UsageError
from shoal.platform.script_line import call_site, is_called_by_shoal, is_called_outside
from shoal.platform.torch_private.kernels import foreach_zero_
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.platform.torch_private.tensor_state import READ_VERSION
from shoal.run.guards.guarded_models import GuardedModels
from shoal.run.state_access import is_access_by_shoal
from shoal.strategies.full_model import given_up_params

_Function = Callable[..., Any]
_NAMES = (
    *("shape", "device", "dtype", "layout", "is_sparse", "is_meta", "is_cuda", "is_cpu"),
    *("is_leaf", "requires_grad", "grad_fn", "grad", "ndim"),
)
READABLE: frozenset[_Function] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _NAMES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_complex),
        *(Tensor.is_floating_point, Tensor.requires_grad_),
    ]
)
"""Functions that `__torch_function__` is given for them."""

_PROPERTIES = ("itemsize", "nbytes", "output_nr", "is_quantized", "is_nested")
_METHODS = (
    *("__repr__", "__hash__", "__len__", "nelement", "ndimension", "element_size", "get_device"),
    *("is_contiguous", "register_hook", "register_post_accumulate_grad_hook", "is_shared"),
    "detach_",
)
_GRAD: Any = Tensor.grad
_DEVICE: Any = Tensor.device.__get__
_ALLOWED: frozenset[_Function] = READABLE | {
    READ_VERSION,
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "data")),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    _GRAD.__delete__,
}
_READ = READABLE | {Tensor.__repr__, Tensor.detach_}
_DRAWS = FILLING_FUNCTIONS | {
    *("trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
    "dropout",
}
"""Names of functions that draw random numbers: the generators of the other ranks would go on."""
_IN_PLACE_OPERATORS = ("iadd__", "isub__", "imul__", "itruediv__")


@dataclass
class Absence:
    """Facts about a value that is elsewhere.

    Attributes:
        fact: "the values of 0.weight are on another rank under pipeline=2".
        cure: sentences.
        device: of this rank's weights.
        is_in_stage: the rank that has it makes the same calls. False for servers.
        is_own: it belongs to the model, so Shoal itself may use it.
        is_zeroed: a gradient that was zeroed.
    """

    fact: str
    cure: str
    device: torch.device
    is_in_stage: bool = True
    is_own: bool = False
    is_zeroed: bool = False

    def refusal(self, call: str) -> UsageError:
        """Return the error about a use of this value."""
        return UsageError(f"{call}{call_site()}: {self.fact}. {self.cure}")


def _answer(
    _: type,
    func: _Function,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a function of absent values that needs none of them.

    Raises: UsageError: it needs values.
    """
    options = dict(kwargs or {})
    absent: Any = next(filter(is_absent, tree_leaves((args, options))))
    absence: Absence = absent.absence
    # torch's functions on the meta device must see that device.
    if func == _DEVICE and is_called_outside():
        return absence.device
    # It tells nothing of values, or is a call of Shoal's own.
    needs_none = func in (_ALLOWED if absence.is_in_stage else _READ)
    if needs_none or is_access_by_shoal() or (absence.is_own and is_called_by_shoal()):
        with DisableTorchFunctionSubclass():
            return func(*args, **options)
    if func is foreach_zero_:
        for each in args[0]:
            each.zero_()
        return None
    label = getattr(func, "__name__", "")
    answer = _written(absence, label, args)
    if answer is None and absence.is_in_stage and label not in _DRAWS:
        answer = _without_values(absence, func, args, options)
    if answer is None:
        if label == "__get__":  # of a property
            label = func.__self__.__name__  # type: ignore[attr-defined]
        raise absence.refusal(label.strip("_"))
    return answer


def _written(absence: Absence, label: str, args: Sequence[Any]) -> Any:
    """Return the absent value that a function writes into, which its rank does; None if none."""
    if label == "zero_":
        absence.is_zeroed = True
        return args[0]
    in_place = label.endswith("_")
    if label.startswith("__"):
        in_place = label == "__setitem__" or label[2:] in _IN_PLACE_OPERATORS
    is_write = absence.is_in_stage and label not in _DRAWS and in_place
    return args[0] if is_write and is_absent(args[0]) else None


def _without_values(
    absence: Absence, func: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return what follows from absent values alone, absent too; None if it needs values."""
    if not all(is_absent(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
        return None
    with DisableTorchFunctionSubclass(), suppress(Exception):  # torch's, without values
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta:
            return _as_absent(result, Absence(absence.fact, absence.cure, absence.device))
    return None


class AbsentValue(Tensor):
    """A buffer or a gradient that is elsewhere, or what follows from absent values alone."""

    absence: Absence
    __torch_function__: Any = classmethod(_answer)


class AbsentGradient(AbsentValue):
    """A stand-in for a gradient."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a parameter has no gradient."""


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on another rank."""

    absence: Absence
    __torch_function__: Any = classmethod(_answer)


def is_absent(value: Any) -> bool:
    """Return True for a value that is elsewhere."""
    return isinstance(value, AbsentValue | AbsentParameter)


def _as_absent(
    values: Tensor, absence: Absence, kind: type[AbsentValue] = AbsentValue
) -> AbsentValue:
    absent = values.as_subclass(kind)
    absent.absence = absence
    return absent


def guard_absent_weights(guarded: GuardedModels, undo: ExitStack) -> None:
    """Refuse reads of weights that other ranks hold, until `undo` is closed."""

    def absence(name: str) -> Absence:
        return Absence(
            f"the values of {name} are on another rank{guarded.under}",
            "Take whole values from run.weights(), on all ranks, for an average of weights for "
            "example; or use ddp or zero1, where every rank holds whole parameters.",
            guarded.mesh.device,
            is_own=True,
        )

    for name, parameter in guarded.parameters.items():
        if parameter.is_meta and type(parameter) is nn.Parameter:
            marked: Any
            for marked in (parameter, *given_up_params(parameter)):
                marked.__class__ = AbsentParameter  # the object stays, and all who hold it
                marked.absence = absence(name)
                undo.callback(setattr, marked, "__class__", nn.Parameter)
    for path, module in guarded.modules():
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta and type(buffer) is Tensor:
                buffers[name] = _as_absent(buffer, absence(f"{path}{name}"))


def removed_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters whose stand-in was removed: `.grad` is None.

    Raises: UsageError: a gradient was zeroed, or replaced.
    """
    for name, parameter in parameters.items():
        gradient: Any = parameter.grad
        if gradient is None or (is_absent(gradient) and not gradient.absence.is_zeroed):
            continue
        raise UsageError(
            f"the gradient of {name} is on the servers, and .grad was zeroed or replaced, which "
            "they do not see. To leave the parameter out of the step set its .grad to None; to "
            "leave out the step call optimizer.zero_grad() on all ranks; other changes belong into "
            "compute_loss."
        )
    return [name for name, parameter in parameters.items() if parameter.grad is None]


class AbsentGradients:
    """The stand-ins of some parameters, made once: NaN of their shapes, without memory.

    Args: parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], under: str) -> None:
        self._absent: list[tuple[str, nn.Parameter, AbsentValue]] = []
        for name, parameter in parameters.items():
            absence = Absence(
                f"the gradient of {name} is not on this rank{under}",
                "For norms and clipping use run.clip_gradients(max_norm), for values "
                "run.gradients().",
                parameter.device,
                is_in_stage=parameter.is_meta,
            )
            nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            absent = _as_absent(nan.expand(parameter.shape), absence, AbsentGradient)
            self._absent.append((name, parameter, absent))
        self._was_shown = False

    def show(self) -> None:
        """Put the stand-ins where `.grad` is None."""
        for _, parameter, absent in self._absent:
            if parameter.grad is None:
                absent.absence.is_zeroed = False
                parameter.grad = absent

    def shown(self) -> set[str]:
        """Return the names of parameters whose stand-in the script has left where it was."""
        return {name for name, parameter, absent in self._absent if parameter.grad is absent}

    def zeroed(self) -> set[str]:
        """Return the names of parameters whose stand-in the script has set to zero."""
        return {
            name
            for name, parameter, absent in self._absent
            if parameter.grad is absent and absent.absence.is_zeroed
        }

    def hide_from_update(self) -> None:
        """Hide stand-ins from the update of an optimizer, which would step by them."""
        self._was_shown = self.hide()

    def show_after_update(self) -> None:
        """Show the stand-ins again that were hidden from an update."""
        if self._was_shown:
            self.show()

    def hide(self) -> bool:
        """Remove the stand-ins. Return True if there were any."""
        there = False
        for _, parameter, absent in self._absent:
            if parameter.grad is absent:
                there = True
                parameter.grad = None
        return there
