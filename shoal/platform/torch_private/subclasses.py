"""Making tensor subclasses, and what stands around functions and operators of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as _DeviceContext

# Why: the only way to make a tensor with a shape and no memory of its own, which torch's own
# DTensor takes. Without: no tensor could have the shape of the whole and hold a slice.
# Checked: 2.11, 2.13, 2.15.
make_wrapper_subclass: Any = Tensor._make_wrapper_subclass

# Why: a __torch_function__ that lets torch's own function run must not be called by it again; the
# documented way, `super().__torch_function__`, makes each result an instance of the subclass.
# Without: endless recursion. Checked: 2.11, 2.13, 2.15.
DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass

# Why: who looks at tensors from outside must not be seen by the modes that follow a script, and the
# public class lets modes see. Without: a pipeline would take a hook of the recorder's for a step of
# the script's. Checked: 2.11, 2.13, 2.15.
DisableTorchFunction: Any = torch._C.DisableTorchFunction

# Why: what stands around a function now does not when autograd computes it again, and there is no
# public list. Without: dropout of slices would be drawn by other rules in a recomputed unit. An
# alias, for torch.compile knows it. Checked: 2.11, 2.13, 2.15.
function_modes = _get_current_function_mode_stack

# Why: the mode of `torch.device(...)` as a context is everywhere anyway, and its class has no
# public name. Without: it would be entered twice. Checked: 2.11, 2.13, 2.15.
DeviceMode = _DeviceContext

# Why: a tensor that is made of others, a DTensor say, is told by no public name. Without: its
# memory would be counted as none, and an optimizer's state of it would be taken for whole. An
# alias, for torch.compile knows it. Checked: 2.11, 2.13, 2.15.
is_made_of_tensors = _python_dispatch.is_traceable_wrapper_subclass

# Why: the only way to see every operator that runs, random ones among them; torch's own tutorials
# take it from this module. Without: draws of a batch could not be handed to its parts.
# Checked: 2.11, 2.13, 2.15.
DispatchMode: Any = _python_dispatch.TorchDispatchMode

# Why: a trial inside of a step is not to be seen by the modes of the step, which would share out
# its random numbers, and there is no public switch. Without: a trial of a loss would be refused by
# the global draws of the step. Checked: 2.11, 2.13, 2.15.
disable_dispatch_modes: Any = _python_dispatch._disable_current_modes

# Why: a subclass that only adds properties must not slow down every function of torch, and the
# documented `super().__torch_function__` runs Python for each. Without: a parameter that servers
# own would cost microseconds at each use. Checked: 2.11, 2.13, 2.15.
DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl

# Why: a mode that stands around a whole function is to let a block inside run at full speed, and a
# mode has no switch. Without: each operation inside a block would be looked at.
# Checked: 2.11, 2.13, 2.15.
pop_mode_temporarily: Any = _pop_mode_temporarily

# Why: these two take 0.1 us and have no public names. Without: a profiler would see no collective
# of backend "shoal", and make_fx would leave collectives out. Checked: 2.11, 2.13, 2.15.
number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

# Why: a fake tensor says that it is on the CPU, and has no memory. Without: its collective would
# read memory that is not there. Checked: 2.11, 2.13, 2.15.
is_fake: Callable[[Any], bool] = fake_tensor.is_fake


def has_dispatch_modes() -> bool:
    """Return whether a mode stands around the operators of this thread.

    Why: no public name tells. Without: a mode that does not end where it began would change places
    with one of the script's, such as a counter of operators. Checked: 2.11, 2.13, 2.15.
    """
    return bool(_python_dispatch._get_current_dispatch_mode_stack())


def push_dispatch_mode(mode: Any) -> None:
    """Let `mode` see the operators of this thread until `remove_dispatch_mode`.

    Why: a context manager ends before those that began later, and what begins in an iterator ends
    in another call. Without: a loop around a loader could not be followed. Checked: 2.11, 2.13,
    2.15.
    """
    _python_dispatch._push_mode(mode)


def remove_dispatch_mode(mode: Any) -> None:
    """Take `mode` out of this thread's modes, also from below others that began later.

    Why and without: as `push_dispatch_mode`. Checked: 2.11, 2.13, 2.15.
    """
    above: list[Any] = []
    for other in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        _python_dispatch._pop_mode()
        if other is mode:
            break
        above.append(other)
    for other in reversed(above):
        _python_dispatch._push_mode(other)
