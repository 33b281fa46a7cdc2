"""Modes, profilers and fake tensors: what watches or replaces torch's operators at the moment."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor

# Why: these two take 0.1 us and have no public names. Without: a profiler would see no collective
# of backend "shoal", and make_fx would leave collectives out. Checked: 2.11, 2.13, 2.15.
number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

# Why: a fake tensor says that it is on the CPU, and has no memory. Without: its collective would
# read memory that is not there. Checked: 2.11, 2.13, 2.15.
is_fake: Callable[[Any], bool] = fake_tensor.is_fake
