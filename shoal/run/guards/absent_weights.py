"""Weights of other ranks' stages, shown without values: what needs the values is an error.

mean.mul_(0.9).add_(parameter)     refused: many functions of torch would leave `mean` as it is
parameter.clamp_(-1, 1)            allowed: the rank that holds it does so
mask = parameter.abs() > 0.1       allowed: absent, too
parameter.mul_(mask)
parameter.normal_()                allowed: drawn and dropped, so generators go on alike
parameter.device                   the device of this rank's weights, for `x.to(device)`

Nor do old parameters keep values that a script has held since before they were divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.platform.torch_private.tensor_state import READ_VERSION
from shoal.run.guards.absent_gradient import READABLE
from shoal.run.guards.call_site import call_site, is_called_by_shoal, is_called_outside
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.new_tensors import NEW_TENSORS, new_tensor_like
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
DRAWS = frozenset(
    [
        *("randn_like", "rand_like", "randint_like", "normal_", "uniform_", "bernoulli_"),
        *("exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "trunc_normal_"),
        *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
    ]
)
"""Functions that draw random numbers for a weight, of torch and `torch.nn.init`."""
_IN_PLACE_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor")


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
    """Call a function of absent weights; what it computes of them alone is absent, too.

    Raises: UsageError: it needs values, or combines them with other tensors.
    """
    leaves = tree_leaves((args, kwargs))
    absent = next(leaf for leaf in leaves if _is_absent(leaf))
    # torch's functions on the meta device must see that device.
    if func == _DEVICE and is_called_outside(2):
        return absent.device_here
    if func in _ALLOWED or is_access_by_shoal() or (absent.is_own and is_called_by_shoal()):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    label = getattr(func, "__name__", "")
    if (made := _made_or_drawn(absent, func, label, args, kwargs)) is not None:
        return made
    if _is_in_place(label):
        is_done, result = _written_where_here(func, args, kwargs)
        if is_done:
            return result
    computed, failure = _computed_shapes(func, args, kwargs)
    if computed:
        return tree_map(
            lambda leaf: _as_absent(leaf, absent.weight_name, absent.under), computed[0]
        )
    read = "" if label.startswith("__get") else label.strip("_")
    raise UsageError(
        f"{read}{call_site()}: the values of {absent.weight_name} are on another rank"
        f"{absent.under}. Take whole values from run.weights(), on all ranks, for an average of "
        "weights for example; or use ddp or zero1, where every rank holds whole parameters."
    ) from failure


def _new_tensor(
    absent: AbsentWeight, label: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the result of a method that makes a tensor like this weight; None for others."""
    if label not in NEW_TENSORS or not args or args[0] is not absent:
        return None
    return new_tensor_like(absent, label, tuple(args[1:]), dict(kwargs), absent.device_here)


def _made_or_drawn(
    absent: AbsentWeight,
    func: _Function,
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Return what needs no values: a new tensor, or random numbers; None for other functions."""
    made = _new_tensor(absent, label, args, kwargs)
    return _drawn_aside(absent, func, label, args, kwargs) if made is None else made


def _drawn_aside(
    absent: AbsentWeight,
    func: _Function,
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Draw as for the values themselves, so that this rank's generator goes on as all others do.

    Returns: what the function returns, absent too; None if it does not draw for one weight alone.
    """
    if label not in DRAWS or sum(map(_is_absent, tree_leaves((args, kwargs)))) > 1:
        return None
    whole = torch.empty(absent.shape, dtype=absent.dtype, device=absent.device_here)
    given, named = tree_map(lambda leaf: whole if _is_absent(leaf) else leaf, (tuple(args), kwargs))
    with torch.no_grad():
        func(*given, **named)
    if _is_in_place(label):
        return absent
    return _as_absent(torch.empty_like(whole, device="meta"), absent.weight_name, absent.under)


def _computed_shapes(
    func: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Exception | None]:
    """Call a function whose tensors are all absent.

    Returns: its result, in a list; an empty list if it needs values, with torch's error.
    """
    if not all(_is_absent(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
        return [], None
    try:
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever torch raises where values are missing
        return [], error
    return [result] if _is_without_values(result) else [], None


def _is_without_values(result: Any) -> bool:
    """Return True if a function computed nothing but shapes."""
    return all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(result))


def _written_where_here(
    func: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bool, Any]:
    """Call a function that writes in place for those of its targets that this rank holds.

    The rank that holds the others writes into them.

    Returns: whether that is all, and the result. It is not where it reads absent values.
    """
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if _is_absent(target):
        return True, target
    if not isinstance(target, (list, tuple)):
        return False, None
    here = [index for index, item in enumerate(target) if not _is_absent(item)]
    kept = [[x[i] for i in here] if _goes_with(x, target) else x for x in args]
    if any(map(_is_absent, tree_leaves((kept, kwargs)))):
        return False, None
    return True, func(*kept, **kwargs) if here else None


def _is_absent(value: Any) -> bool:
    return isinstance(value, (AbsentWeight, AbsentParameter))


def _goes_with(value: Any, targets: Sequence[Any]) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == len(targets)


def _is_in_place(label: str) -> bool:
    if label.startswith("__"):
        return label == "__setitem__" or (label[3:-2] in _IN_PLACE_OPERATORS and label[2] == "i")
    return label.endswith("_")
