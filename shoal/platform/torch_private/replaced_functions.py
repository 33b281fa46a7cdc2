"""Functions of torch that are replaced while models are prepared.

Scripts have imported the public functions by name before a run begins, so these themselves cannot
be replaced. All of them lead to the ones here.
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

from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass

# Why: `clip_grad_norm_` and `clip_grad_value_` look up the norm, and the choice of a loop, by these
# names. Without: a norm over one stage of a pipeline would be taken for that of the model.
# Checked: 2.11, 2.13, 2.15.
TOTAL_NORM = ((clip_grad, "_get_total_norm"),)
USES_LISTS = ((clip_grad, "_has_foreach_support"),)

# Why: `Tensor.backward`, and names that a script has imported before, all lead to it, so that
# parameters need no hook which each backward pass would call. Without: a hook on every parameter,
# some microseconds each in every step. Checked: 2.11, 2.13, 2.15.
BACKWARD = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
)

# Why: scripts import `functional_call` by name before a run begins, and modules do not learn that
# they compute with other weights. Without: an engine would put the model's own weights in the place
# of those that were given, in silence. Checked: 2.11, 2.13, 2.15.
FUNCTIONAL_CALL = ((stateless, "_functional_call"),)

# Why: `unscale_` and `step` of every GradScaler lead to it, and `step` looks at the gradients of
# this rank alone. Without: torch's kernel takes no shards beside whole tensors, and an infinite
# gradient in one rank's part would make that rank alone skip the step. Checked: 2.13.
UNSCALING = ((GradScaler, "_unscale_grads_"),)

# Public names.
SAVE = ((torch, "save"), (torch.serialization, "save"))


def replace_function(
    places: tuple[tuple[Any, str], ...], make: Callable[[Any], Any]
) -> Callable[[], None]:
    """Replace a function by what `make` returns for it; return a function that puts it back.

    Args: places: owners of the function with its name there, such as TOTAL_NORM.
    """
    originals = [getattr(owner, name) for owner, name in places]
    replacement = make(originals[0])
    for owner, name in places:
        setattr(owner, name, replacement)

    def put_back() -> None:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)

    return put_back


_ANSWER = "__torch_function__"


def answer_for_shards(call: Callable[[Any, Any, Any], Any]) -> Callable[[], None]:
    """Let `call` be given each function of torch that is given a DTensor, with its arguments, and
    compute what it returns; return a function that ends it. No functions are seen inside of it.

    Why: torch has the errors about shards that meet whole tensors in C, and no hook is called where
    one is read or drawn into. Without: each of some hundred functions would have to be replaced.
    Checked: 2.13.
    """
    shards: Any = DTensor
    before = vars(shards)[_ANSWER]

    def answer(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {})

    setattr(shards, _ANSWER, classmethod(answer))

    def end() -> None:
        setattr(shards, _ANSWER, before)

    return end


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
