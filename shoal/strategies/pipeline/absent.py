"""An absent tensor: a value that another stage of the pipeline computes.

It has a shape, a dtype and a device, and no memory. Code around the blocks of a model may pass it
on, look at its shape and compute with it; the results are absent too.

Absent values, and the values that a stage computes in their place, have *names*: the number of the
event that made them (a call of a unit, or of a torch function), and the index among its results.
All ranks of a pipeline go through the same events, so a name means the same on all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.errors import ShoalError, StrategyRefused
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import READ_VERSION

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda"),
    *("is_meta", "is_sparse", "is_cpu", "itemsize", "nbytes", "is_nested", "grad"),
)
_METHODS = (
    *("size", "dim", "stride", "numel", "nelement", "ndimension", "is_floating_point"),
    *("is_complex", "is_contiguous", "element_size", "get_device", "__len__", "__hash__"),
    *("__repr__", "is_signed", "is_inference"),
)
SHAPE_FUNCTIONS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(Tensor, name) for name in _METHODS]
    + [READ_VERSION]
)
"""Functions that look at a tensor's shape, dtype or device, and not at its values."""
GRADIENT_FUNCTIONS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
"""Functions that take gradients of what they are given."""
GRADIENT_INSIDE = (
    "pipeline: a gradient is taken inside compute_loss (torch.autograd.grad or .backward()), and "
    "other ranks hold layers that it would go through. Use ddp or zero."
)


class ValueName(NamedTuple):
    """The name of a value: the number of the event that made it, the index among its results."""

    event: int
    leaf: int


class StageDone(BaseException):
    """The stage is complete. No Exception, so that `except Exception` in user code lets it pass."""


class WalkRefusal(BaseException):
    """The reason why a function cannot be divided. Passes `except Exception` in user code too."""


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """Raise StrategyRefused for a WalkRefusal, outside of the user's function."""
    try:
        yield
    except WalkRefusal as refusal:
        raise StrategyRefused(str(refusal)) from refusal


@contextmanager
def absence_explained() -> Iterator[None]:
    """Raise WalkRefusal for an error that comes where blocks are absent, and not without."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        raise WalkRefusal(
            "pipeline: where blocks of other ranks are left out, compute_loss ends with "
            f"{type(error).__name__}: {error}. Does code around the blocks use what a block keeps "
            "in an attribute, a list or a counter? Return it from the block."
        ) from error


@contextmanager
def own_functions_refused() -> Iterator[None]:
    """Raise WalkRefusal in this context for an autograd.Function of an absent value.

    No gradient would find its way from the function's result to what is received for the value.
    """
    function: Any = torch.autograd.Function
    apply = vars(function)["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_checkpoint = cls.__name__ == "_NoopSaveInputs"  # use_reentrant=False, before torch 2.13
        if not is_checkpoint and any(
            absent_of(tensor) is not None for tensor in tensors_in((args, kwargs))
        ):
            raise WalkRefusal(
                f"pipeline: {cls.__name__}, an autograd.Function, is called between blocks, with "
                "what another rank computes. Call it inside a block that has parameters; for a "
                "checkpoint around blocks, use use_reentrant=False."
            )
        return apply.__get__(None, cls)(*args, **kwargs)  # a C descriptor since torch 2.15

    function.apply = classmethod(checked)
    try:
        yield
    finally:
        function.apply = apply


class ReceivedValues:
    """The values that one stage has received for a micro-batch, by name.

    Absent tensors refer to it, because a checkpoint in the user's code may hand an absent argument
    to a block again, in the backward pass.

    Args: device: of this rank.
    """

    def __init__(self, stage: int | None, labels: list[str], device: torch.device) -> None:
        self.by_name: dict[ValueName, Tensor] = {}
        self.device = device
        self.stage = stage
        self.labels = labels
        """Labels of the events so far."""
        self.walking = True
        """False after the function has ended, in the backward pass."""
        self.written: list[Tensor] = []
        """Tensors of the script into which absent values were written."""

    def forget_written(self) -> None:
        """Let tensors have their own values again, after a walk that has computed nothing."""
        for target in self.written:
            vars(target).pop("shoal_absent", None)
        self.written = []

    def of(self, absent: AbsentTensor) -> Tensor:
        """Return the value that was received for an absent tensor.

        Raises: WalkRefusal: none was.
        """
        value = self.by_name.get(absent.value_name)
        if value is None:
            maker = self.labels[absent.value_name.event - 1]
            if self.stage is None:
                raise WalkRefusal(
                    f"pipeline: compute_loss uses what {maker} has made, which another rank has: "
                    "it gets there by an attribute, a list or a hook, or is from an earlier call. "
                    "Return it from the block that makes it, and from the model."
                )
            reason = (
                "it gets there by other ways than an argument. Pass it as an argument"
                if self.walking
                else "a checkpoint lies around both. Checkpoint block by block"
            )
            raise WalkRefusal(
                f"pipeline: stage {self.stage} needs what {maker} has made in an earlier stage: "
                f"{reason}, or cut elsewhere: cuts=NAME."
            )
        return value


class AbsentTensor(Tensor):
    """A tensor of another stage: shape, dtype and device without memory.

    Attributes:
        meta: a tensor on the meta device with the same shape and dtype.
        received: where its value is found once this stage has begun.
        value_name: the name of its value.
        has_gradients: autograd follows it in the stage that computes it.
    """

    meta: Tensor
    received: ReceivedValues
    value_name: ValueName
    has_gradients: bool

    @staticmethod
    def __new__(cls, meta: Tensor, device: Any, received: ReceivedValues) -> AbsentTensor:
        self = make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        self.meta = meta
        self.received = received
        self.value_name = ValueName(0, 0)
        self.has_gradients = False
        return self  # type: ignore[no-any-return]

    def __init__(self, meta: Tensor, device: Any, received: ReceivedValues) -> None:
        """Do nothing: `__new__` has done it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called inside units, and in a backward pass; elsewhere the walk's mode comes first."""
        if func in SHAPE_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(filled, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise WalkRefusal(
            f"pipeline: {func} got a value of another stage by a way that torch does not report. "
            "Put the code that does so into a block of the model."
        )


def absent_of(value: Any) -> AbsentTensor | None:
    """Return the absent tensor that `value` is, or that stands for it; None for other values.

    An absent value may have been written into a real tensor, which is then absent itself.
    """
    if isinstance(value, AbsentTensor):
        return value
    if isinstance(value, Tensor):
        return getattr(value, "shoal_absent", None)
    return None


def mark_absent(target: Tensor, absent: AbsentTensor) -> None:
    """Note that an absent value was written into `target`."""
    target.shoal_absent = absent  # type: ignore[attr-defined]
    absent.received.written.append(target)


def filled(value: Any) -> Any:
    """Return the received value for an absent tensor; any other value as it is."""
    absent = absent_of(value)
    return value if absent is None else absent.received.of(absent)


def filled_nest(nest: Any) -> Any:
    """Return a nest with received values for absent tensors.

    Lists without absent tensors remain the user's own, because a block may append to them.
    """
    if all(absent_of(leaf) is None for leaf in tree_leaves(nest)):
        return nest
    if type(nest) in (list, tuple):
        return type(nest)(map(filled_nest, nest))
    if type(nest) is dict:
        return {key: filled_nest(value) for key, value in nest.items()}
    return tree_map(filled, nest)


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nest of tuples, lists and dicts, as torch functions get them."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list, dict)):
        items: Iterable[Any] = nest.values() if isinstance(nest, dict) else nest
        for item in items:
            yield from tensors_in(item)


def tensors_of_result(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a function returns, those in attributes of objects too."""
    for leaf in tree_leaves(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from tensors_in(vars(leaf))


def filled_result(nest: Any) -> Any:
    """Return what a function returns with received values for absent tensors, those in attributes
    of objects too.
    """

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return filled(leaf)
        if any(absent_of(tensor) is not None for tensor in tensors_of_result(leaf)):
            leaf = copy(leaf)
            vars(leaf).update(filled_nest(vars(leaf)))
        return leaf

    return tree_map(fill, nest)


REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
HOOK_FUNCTIONS = frozenset((Tensor.register_hook, Tensor.retain_grad))
_WITHOUT_GRADIENTS = ("detach", "data", "argmax", "argmin", "argsort")


def has_gradients(value: Tensor) -> bool:
    """Return whether autograd follows a value, which may be absent."""
    absent = absent_of(value)
    return value.requires_grad if absent is None else absent.has_gradients


def seems_to_require_grad(value: Tensor, frame: FrameType) -> bool:
    """Return what `requires_grad` tells of a value, which may be absent, to code in a frame.

    Backward hooks of modules are for the stage that computes a value, so torch, which asks if it
    has to prepare for them, is told that an absent value has no gradient.
    """
    is_for_hook = frame.f_code.co_filename == torch.utils.hooks.__file__
    return has_gradients(value) and not (is_for_hook and absent_of(value) is not None)


def note_gradients(out: Any, used: Iterable[Any], label: str = "", trains: bool = False) -> None:
    """Note of absent results whether autograd follows them in the stage that computes them.

    Args:
        used: what they were computed from.
        label: name of the function.
        trains: they were computed with parameters that are trained.
    """
    tensors = (value for value in used if isinstance(value, Tensor))
    follows = torch.is_grad_enabled() and label not in _WITHOUT_GRADIENTS
    follows = follows and (trains or any(map(has_gradients, tensors)))
    for value in tree_leaves(out):
        if isinstance(value, AbsentTensor):
            value.has_gradients = follows and value.meta.is_floating_point()


def no_hook(func: Any) -> RemovableHandle | None:
    """Return what a function of HOOK_FUNCTIONS gives where there is no gradient to call a hook: for
    a value that another stage computes, and in a pass without gradients that the script never made.
    """
    return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None


def property_of(func: Any) -> str:
    """Return the name of a property, such as `data`, that torch reads by `__get__`; else ""."""
    is_read = getattr(func, "__name__", "") == "__get__"
    return getattr(func.__self__, "__name__", "") if is_read else ""
