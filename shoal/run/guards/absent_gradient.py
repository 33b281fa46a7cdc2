"""A stand-in for a gradient that this rank does not have.

Where servers or other stages have a gradient, `.grad` would be None, and a loop that sums norms
over `.grad` would leave it out in silence. The stand-in can be asked for its shape, and removed.
Any other use is an error that names the cure.

`READABLE` are the attributes of a tensor that tell nothing of its values; other stand-ins, such as
absent weights, have them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.kernels import foreach_zero_
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.run.guards.guarded_models import Removable

_NAMES = (
    *("shape", "device", "dtype", "layout", "is_sparse", "is_meta", "is_cuda", "is_cpu"),
    *("is_leaf", "requires_grad", "grad_fn", "grad", "ndim"),
)

READABLE: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _NAMES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_complex),
        *(Tensor.is_floating_point, Tensor.requires_grad_),
    ]
)
"""Functions that `__torch_function__` is given for them."""

_ALLOWED = READABLE | {Tensor.__repr__, Tensor.detach_}


EDITS = frozenset(
    [
        *("mul_", "__imul__", "div_", "__itruediv__", "neg_", "clamp_", "clamp_min_"),
        *("clamp_max_", "clip_", "nan_to_num_", "sign_", "round_"),
    ]
)
"""Methods that edit one gradient or weight in place, by their names: other guards wrap them."""


def _are_numbers(arguments: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(arguments))


class AbsentGradient(Tensor):
    """A gradient that is not on this rank: NaN of the right shape, without memory."""

    parameter_name: str
    under: str
    is_zeroed = False
    is_in_other_stage = False

    @classmethod
    def of(cls, parameter: Tensor, name: str, under: str) -> AbsentGradient:
        """Return a stand-in for the gradient of `parameter`.

        Args: under: words such as " under server".
        """
        nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        absent = nan.expand(parameter.shape).as_subclass(cls)
        absent.parameter_name, absent.under = name, under
        absent.is_in_other_stage = parameter.is_meta
        return absent

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is foreach_zero_:
            for item in args[0]:
                item.zero_()
            return None
        if func is Tensor.zero_:
            args[0].is_zeroed = True
            return args[0]
        is_edit = getattr(func, "__name__", "") in EDITS and args[0].is_in_other_stage
        if is_edit and _are_numbers((*args[1:], kwargs)):
            return args[0]  # that stage edits the gradient
        if func in _ALLOWED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        absent = next(
            item for item in tree_leaves((args, kwargs)) if isinstance(item, AbsentGradient)
        )
        raise absent.refusal(getattr(func, "__name__", str(func)))

    def refusal(self, call: str) -> UsageError:
        """Return the error about a use of this gradient."""
        return UsageError(
            f"{call}{call_site()}: the gradient of {self.parameter_name} is not on this rank"
            f"{self.under}. For norms and clipping use run.clip_gradients(max_norm), for values "
            "run.gradients()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a parameter has no gradient."""
        return None


def removed_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters whose stand-in was removed: `.grad` is None.

    Raises: UsageError: a gradient was zeroed, or replaced.
    """
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or (isinstance(gradient, AbsentGradient) and not gradient.is_zeroed):
            continue
        raise UsageError(
            f"the gradient of {name} is on the servers, and .grad was zeroed or replaced, which "
            "they do not see. To leave the parameter out of the step set its .grad to None; to "
            "leave out the step call optimizer.zero_grad() on all ranks; other changes belong into "
            "compute_loss."
        )
    return [name for name, parameter in parameters.items() if parameter.grad is None]


class AbsentGradients:
    """The stand-ins of some parameters, made once.

    Attributes: parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], under: str) -> None:
        self.parameters = parameters
        self._absent = [(p, AbsentGradient.of(p, name, under)) for name, p in parameters.items()]
        self._shown = False

    def show(self) -> None:
        """Put the stand-ins where `.grad` is None."""
        self._shown = True
        for parameter, absent in self._absent:
            if parameter.grad is None:
                absent.is_zeroed = False
                parameter.grad = absent

    def hide(self) -> bool:
        """Remove the stand-ins. Return True if they were shown, and none was removed since."""
        if not self._shown:
            return False
        self._shown = False
        there = False
        for parameter, absent in self._absent:
            if parameter.grad is absent:
                there = True
                parameter.grad = None
        return there

    def hide_in_steps(self, optimizers: Iterable[Optimizer]) -> Iterator[Removable]:
        """Hide stand-ins from the optimizers, which would step by them; yield handles."""
        shown = False

        def before(*_: Any) -> None:
            nonlocal shown
            shown = self.hide()

        def after(*_: Any) -> None:
            if shown:
                self.show()

        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(before)
            yield optimizer.register_step_post_hook(after)
