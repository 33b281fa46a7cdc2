"""One run of a function on a sample, with all units: which are called, how long each takes, and
which values leave them by other ways than what they return.

A value that a hook inside a block hands out, say, would be missing in another stage. So no stage
begins between its maker and its user.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.platform.autograd_graph import nodes_behind
from shoal.platform.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from shoal.strategies.pipeline.absent import (
    GRADIENT_FUNCTIONS,
    GRADIENT_INSIDE,
    SHAPE_FUNCTIONS,
    WalkRefusal,
    tensors_in,
)
from shoal.strategies.pipeline.meta_call import OutputForms
from shoal.strategies.pipeline.units import UnitCall, Units


class SideWay(NamedTuple):
    """A value that left a unit otherwise than by what the unit returns.

    Attributes:
        made, used: indices of the calls that made it, and up to which it was used.
        user: what used it.
    """

    made: int
    used: int
    user: str


class UnitProfile(TorchFunctionMode):
    """Observes one whole run of a function.

    Args:
        forms: learns how results look like arguments; None to learn nothing.
        timed: measure each unit, forward and backward.

    Attributes:
        calls: of units, in order.
        times_s: of each call; empty if not timed.
        side_ways: values that leave units.
        mutated_buffers: ids of the buffers into which the run has written; set by its caller.
        registers_hooks: code registers hooks on tensors.
        parameters_around: names of parameters that the code around units uses.
    """

    def __init__(self, units: Units, forms: OutputForms | None, timed: bool) -> None:
        super().__init__()
        self.units = units
        self.forms = forms
        self.timed = timed
        self.calls: list[UnitCall] = []
        self.times_s: list[float] = []
        self.side_ways: list[SideWay] = []
        self.registers_hooks = False
        self.mutated_buffers: set[int] = set()
        self.parameters_around: set[str] = set()
        self._turns: Counter[str] = Counter()
        self._call = -1  # index of the call inside which the run is; -1 around units
        # id of a tensor -> the call that made it, or -1 for the code around; kept alive.
        self._makers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in GRADIENT_FUNCTIONS and self._call < 0:
            self._check_gradient(tensors_in((args, kwargs or {})))
        out = func(*args, **(kwargs or {}))
        self.registers_hooks = self.registers_hooks or func is Tensor.register_hook
        if func not in SHAPE_FUNCTIONS:
            used = list(tensors_in((args, kwargs or {})))
            until = self._call if self._call >= 0 else len(self.calls) - 1
            self._find_side_ways(used, until, getattr(func, "__name__", ""))
            if self._call < 0:
                names = (self.units.parameters.get(id(x)) for x in used)
                self.parameters_around |= {name for name in names if name is not None}
            self._mark(out)
        return out

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit, and measure it."""
        if self._call >= 0:
            return forward(*args, **kwargs)
        index = len(self.calls)
        self.calls.append(UnitCall(name, self._turns[name]))
        self._turns[name] += 1
        leaves = tree_leaves((args, kwargs))
        self._find_side_ways(leaves, index, name)
        seed = int(torch.randint(2**31 - 1, (), device="cpu"))
        self._call = index
        try:
            run = self._measured if self.timed else self.units.run
            out = run(name, forward, args, kwargs, seed)
        finally:
            self._call = -1
        if self.forms is not None:
            self.forms.learn_likeness(name, leaves, out)
        for result in tree_leaves(out):
            self._makers.pop(id(result), None)
        return out

    def _check_gradient(self, roots: Iterable[Tensor]) -> None:
        """Raise WalkRefusal if what is differentiated comes of a parameter of the model."""
        for node in nodes_behind(root.grad_fn for root in roots):
            if id(getattr(node, "variable", None)) in self.units.parameters:
                raise WalkRefusal(GRADIENT_INSIDE)

    def _find_side_ways(self, used: Sequence[Any], until: int, user: str) -> None:
        for value in used:
            made = self._makers.get(id(value), self._call)
            if made not in (self._call, -1):
                self.side_ways.append(SideWay(made, until, user))

    def _mark(self, out: Any) -> None:
        """Note which call has made these tensors."""
        if self._call < 0:
            return
        for value in tree_leaves(out):
            if (
                isinstance(value, Tensor)
                and id(value) not in self.units.parameters
                and id(value) not in self.units.buffers
            ):
                self._makers[id(value)] = self._call
                self._alive.append(value)

    def _measured(
        self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, seed: int
    ) -> Any:
        """Run a unit forward and backward, differentiated alone, and note the time.

        It runs once: what it has been given may be changed by it, such as a cache.
        """
        device = self.units.device
        copied_args, copied_kwargs = _copied((args, kwargs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        out = self.units.run(name, forward, copied_args, copied_kwargs, seed)
        _backward(out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.times_s.append(time.perf_counter() - start_s)
        return _copied(out)


def _copied(nest: Any) -> Any:
    """Return copies of all tensors, differentiated alone: a unit may write into its inputs."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if value.requires_grad:
            # A clone of a leaf is no leaf, and may be written in place.
            return value.detach().requires_grad_().clone()
        return value.clone()

    leaves, spec = tree_flatten(nest)
    return tree_unflatten([copy(leaf) for leaf in leaves], spec)


def _backward(nest: Any) -> None:
    """Differentiate all tensors of a nest, with gradients of ones."""
    roots = [x for x in tree_leaves(nest) if isinstance(x, Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
