"""Functions of torch that are replaced while models are prepared.

Scripts have imported the public functions by name before a run begins, so these themselves cannot
be replaced. All of them lead to the ones here. Each replacement returns a function that ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd
import torch.autograd.graph
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad, stateless

# Why: `clip_grad_norm_` and `clip_grad_value_` look up the norm, and the choice of a loop, by these
# names. Without: a norm over one stage of a pipeline would be taken for that of the model.
# Checked: 2.11, 2.13, 2.15.
TOTAL_NORM = "_get_total_norm"
USES_LISTS = "_has_foreach_support"


def replace_clipping(name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function inside of clipping by what `make` returns for it; return a function that
    puts it back.

    Why and without: see TOTAL_NORM. Checked: 2.11, 2.13, 2.15.
    """
    original = getattr(clip_grad, name)
    setattr(clip_grad, name, make(original))

    def put_back() -> None:
        setattr(clip_grad, name, original)

    return put_back


_PLACES: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
_NAME = "_engine_run_backward"


def replace_backward_call(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the function behind `torch.autograd.backward` and `grad`; return as above.

    Why: `Tensor.backward`, and names that a script has imported before, all lead to it, so that
    parameters need no hook which each backward pass would call. Without: a hook on every
    parameter, some microseconds each in every step. Checked: 2.11, 2.13, 2.15.
    """
    originals = [getattr(place, _NAME) for place in _PLACES]
    replacement = make(originals[0])
    for place in _PLACES:
        setattr(place, _NAME, replacement)

    def put_back() -> None:
        for place, original in zip(_PLACES, originals, strict=True):
            setattr(place, _NAME, original)

    return put_back


def replace_functional_call(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the function behind `torch.func.functional_call`; return as above.

    Why: scripts import `functional_call` by name before a run begins, and modules do not learn that
    they compute with other weights. Without: an engine would put the model's own weights in the
    place of those that were given, in silence. Checked: 2.11, 2.13, 2.15.
    """
    original = stateless._functional_call
    stateless._functional_call = make(original)

    def put_back() -> None:
        stateless._functional_call = original

    return put_back


def replace_unscaling(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace what a GradScaler does with an optimizer's gradients; return as above.

    Why: `unscale_` and `step` of every GradScaler lead to it, and `step` looks at the gradients of
    this rank alone. Without: torch's kernel takes no shards beside whole tensors, and an infinite
    gradient in one rank's part would make that rank alone skip the step. Checked: 2.13.
    """
    original = GradScaler._unscale_grads_
    GradScaler._unscale_grads_ = make(original)  # type: ignore[method-assign]

    def put_back() -> None:
        GradScaler._unscale_grads_ = original  # type: ignore[method-assign]

    return put_back


_READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default


def watch_numbers(check: Callable[[DTensor], None]) -> Callable[[], None]:
    """Call `check` with each DTensor of which a number is read; return a function that ends it.

    Why: `item()`, `float()` and `bool()` of a sum over shards give this rank's part of it, without
    a warning, and no public name is told of them. Without: `p.grad.norm().item()` would be the norm
    of a shard, in silence. Checked: 2.11, 2.13, 2.15.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers

    def read(_: Any, args: tuple[DTensor, ...], __: Any) -> Any:
        check(args[0])
        return args[0].to_local().item()

    handlers[_READ_NUMBER] = read

    def end() -> None:
        handlers.pop(_READ_NUMBER, None)

    return end
