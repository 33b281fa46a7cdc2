"""Weights of other ranks' stages, shown without values: what needs the values is an error.

mean.mul_(0.9).add_(parameter)     refused: many functions of torch would leave `mean` as it is
parameter.normal_()                refused: the generators of other ranks would go on
parameter.clamp_(-1, 1)            allowed: the rank that holds it does so
mask = parameter.abs() > 0.1       allowed: absent, too
parameter.mul_(mask)
parameter.device                   the device of this rank's weights, for `x.to(device)`

Nor do old parameters keep values that a script has held since before they were divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.script_line import call_site, is_called_by_shoal, is_called_outside
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.platform.torch_private.tensor_state import READ_VERSION
from shoal.run.guards.absent_gradient import READABLE
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.state_access import is_access_by_shoal
from shoal.strategies.full_model import given_up_params

_Function = Callable[..., Any]
_ATTRIBUTES: Any = ("grad", "requires_grad", "data")
_PROPERTIES = ("itemsize", "nbytes", "output_nr", "is_quantized", "is_nested")
_METHODS = (
    *("__repr__", "__hash__", "__len__", "nelement", "ndimension", "element_size", "get_device"),
    *("is_contiguous", "register_hook", "register_post_accumulate_grad_hook", "is_shared"),
)
_GRAD: Any = Tensor.grad
_DEVICE: Any = Tensor.device.__get__
_ALLOWED: frozenset[_Function] = READABLE | {
    READ_VERSION,
    *(getattr(Tensor, name).__set__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    _GRAD.__delete__,
}
_DRAWS = frozenset(
    [
        *("randn_like", "rand_like", "randint_like", "normal_", "uniform_", "bernoulli_"),
        *("exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "trunc_normal_"),
        *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "dropout"),
    ]
)
"""Names of functions that draw random numbers: the generators of the other ranks would go on."""
_IN_PLACE_OPERATORS = ("iadd__", "isub__", "imul__", "itruediv__")


class AbsentWeight(Tensor):
    """A buffer whose values are on another rank, or what follows from absent weights alone.

    Attributes: is_own: it belongs to the model, so Shoal itself may use it.
    """

    weight_name: str = "a parameter"
    under: str = ""
    is_own: bool = False
    device_here: torch.device = torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _answer(func, args, kwargs or {})


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on another rank."""

    weight_name: str = "a parameter"
    under: str = ""
    is_own: bool = True
    device_here: torch.device = torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _answer(func, args, kwargs or {})


def guard_absent_weights(guarded: GuardedModels) -> Iterator[Removable]:
    """Refuse reads of weights that other ranks hold; yield handles."""
    for prefix, model in guarded.models.items():
        for name, parameter in model.named_parameters():
            if parameter.is_meta and type(parameter) is nn.Parameter:
                for each in (parameter, *given_up_params(parameter)):
                    yield _Marked(each, f"{prefix}{name}", guarded)
        for path, module in model.named_modules():
            buffers = own_buffers(module)
            for name, buffer in buffers.items():
                if buffer is not None and buffer.is_meta and type(buffer) is Tensor:
                    full_name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                    absent = _as_absent(buffer, full_name, guarded.under)
                    absent.is_own = True
                    absent.device_here = guarded.mesh.device
                    buffers[name] = absent


class _Marked:
    """A parameter that is marked as absent, until this is removed."""

    def __init__(self, parameter: Any, name: str, guarded: GuardedModels) -> None:
        self._parameter = parameter
        parameter.__class__ = AbsentParameter  # the object stays, and all who hold it
        parameter.weight_name, parameter.under = name, guarded.under
        parameter.device_here = guarded.mesh.device

    def remove(self) -> None:
        """Make it a plain parameter again."""
        self._parameter.__class__ = nn.Parameter


def _as_absent(values: Tensor, name: str, under: str) -> AbsentWeight:
    absent = values.as_subclass(AbsentWeight)
    absent.weight_name, absent.under = name, under
    return absent


def _answer(func: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of absent weights that needs no values.

    Raises: UsageError: it needs values.
    """
    leaves = tree_leaves((args, kwargs))
    absent = next(leaf for leaf in leaves if _is_absent(leaf))
    # torch's functions on the meta device must see that device.
    if func == _DEVICE and is_called_outside(2):
        return absent.device_here
    is_own = is_access_by_shoal() or (absent.is_own and is_called_by_shoal())
    if is_own or func in _ALLOWED:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    label = getattr(func, "__name__", "")
    answer = None if label in _DRAWS else _valueless(absent, func, label, args, kwargs)
    if answer is not None:
        return answer
    read = "" if label.startswith("__get") else label.strip("_")
    raise UsageError(
        f"{read}{call_site()}: the values of {absent.weight_name} are on another rank"
        f"{absent.under}. Take whole values from run.weights(), on all ranks, for an average of "
        "weights for example; or use ddp or zero1, where every rank holds whole parameters."
    )


def _valueless(
    absent: Any, func: _Function, label: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the weight that a function writes into, which another rank does, or a result that is
    absent too; None if it needs values.
    """
    if _is_in_place(label) and _is_absent(args[0]):
        target: Tensor = args[0]
        return target
    if all(_is_absent(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
        with DisableTorchFunctionSubclass(), suppress(Exception):  # torch's, without values
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.is_meta:
                return _as_absent(result, absent.weight_name, absent.under)
    return None


def _is_absent(value: Any) -> bool:
    return isinstance(value, AbsentWeight | AbsentParameter)


def _is_in_place(label: str) -> bool:
    if label.startswith("__"):
        return label == "__setitem__" or label[2:] in _IN_PLACE_OPERATORS
    return label.endswith("_")
