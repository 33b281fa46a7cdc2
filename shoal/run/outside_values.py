"""Values that a loss computes with and that are not of its batch, compared between the ranks.

mean = 0.9 * mean + 0.1 * loss.item()            each rank has the mean of its own samples
run.forward_backward(lambda x, y: ((model(x) - y) ** 2).mean() / mean, x, y)

One device has one such value. No trial of the loss sees the difference, and a Python number cannot
be followed through a loop. So ranks tell each other in some steps what they have used.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.mesh import Mesh
from shoal.platform.script_line import calling_line
from shoal.platform.torch_private.module_state import is_compiled
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.subclasses import disable_dispatch_modes
from shoal.platform.torch_private.tensor_state import in_function_transform
from shoal.strategies.base import PURPOSE, ComputeLoss
from shoal.trial.used_values import MOST_ELEMENTS, UsedValue, differing_uses

_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "truediv", "true_divide", "pow"))
"""Functions whose whole numbers are values; those of other functions are sizes and dimensions."""
_READS = frozenset(("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"))

IN_PASSES = (
    "note: compute_loss computes with a value that is not the same in all passes of a step: "
    "{one} and {other} at {one.line}. Each rank, and each micro-batch, makes a pass, "
    "where one device makes one. If the value comes from samples, compute it from "
    "run.gather(tensor); if it belongs to one sample, pass it with the batch."
)
IN_LOOP = (
    "note: the loop computes samples with a value that is not the same on all ranks: {one} and "
    "{other} at {one.line}. One device has one such value. If it comes from samples, compute it "
    "from run.gather(tensor); if it is random, draw one for each sample."
)


class OutsideValues:
    """Compares between data ranks what a loss computes with beside its batch.

    Attributes:
        is_due: the next step is to be compared; alike on all ranks.
        loop_uses: what the loop has used to compute the samples of this step.

    Args: announce: prints a note, on one rank of all.
    """

    def __init__(self, mesh: Mesh, announce: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._announce = announce
        self._has_noted = False
        self._passes: list[list[UsedValue]] = []
        self.is_due = False
        self.loop_uses: list[UsedValue] = []

    def watch(self, compute_loss: ComputeLoss, model: nn.Module) -> ComputeLoss:
        """Return the function of a step that notes what it uses, if the step is to be compared.

        A compiled model would be compiled anew. A loss that gathers samples couples them anyway.
        """
        self.is_due &= not self._has_noted
        if not self.is_due:
            return compute_loss
        self._passes = []
        if PURPOSE in getattr(compute_loss, "__dict__", ()) or any(
            map(is_compiled, model.modules())
        ):
            return compute_loss
        known = {id(buffer): buffer for buffer in model.buffers()}

        @wraps(compute_loss)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with _Uses((args, kwargs), known) as uses:
                result = compute_loss(*args, **kwargs)
            self._passes.append(uses.seen)
            return result

        return watched

    def compare(self) -> None:
        """Announce a value that ranks, or passes of a rank, do not share. Collective if due."""
        if not self.is_due:
            return
        self.is_due = False
        sentence = self._difference()
        if self._mesh.pipeline.size > 1:  # each stage runs other lines
            sentence = max(self._mesh.pipeline.all_gather_str(sentence))
        if sentence:
            self._has_noted = True
            self._announce(sentence)

    def _difference(self) -> str:
        """Return a note about the first value that differs, or "". Collective along `data`."""
        data, text = self._mesh.data, json.dumps([self.loop_uses, *self._passes])
        self.loop_uses = []
        digest = zlib.crc32(text.encode())
        ends = torch.tensor([digest, -digest], dtype=torch.float64, device=data.host_device)
        largest, negated_smallest = data.all_reduce_max(ends).tolist()
        if largest == -negated_smallest and len(self._passes) < 2:
            return ""
        loops, passes = [], []
        for each in data.all_gather_str(text):
            loop, *others = [[UsedValue(*use) for use in uses] for uses in json.loads(each)]
            loops.append(loop)
            passes += others
        found = next(differing_uses(passes), None)
        if found is not None:
            return IN_PASSES.format(one=found[0], other=found[1])
        found = next(differing_uses(loops), None)
        return "" if found is None else IN_LOOP.format(one=found[0], other=found[1])


class _Uses(TorchFunctionMode):
    """Notes the numbers and constant tensors that functions of torch are given in one pass.

    Args:
        batch: the arguments of the pass.
        known: tensors that are no constants of the script, by their identity.

    Attributes: seen: the uses, in order.
    """

    def __init__(self, batch: Any, known: dict[int, Tensor]) -> None:
        super().__init__()
        self.seen: list[UsedValue] = []
        leaves = tree_leaves(batch)
        self._known: WeakValueDictionary[int, Tensor] = WeakValueDictionary(known)
        self._know(leaves)
        self._rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        self._numbers = {leaf for leaf in leaves if isinstance(leaf, Real)}
        self._has_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Tensors of vmap have no values. A shape is no use of its values, and `.T` is no result.
        is_property = name == "__get__" and self._is_candidate(args[0], False)
        if is_property or in_function_transform():
            return func(*args, **kwargs)
        self._note(name, (*args, *kwargs.values()), sys._getframe(1))
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        self._know(leaves)
        if name in _READS:
            self._has_read = True
            self._numbers.update(leaf for leaf in leaves if isinstance(leaf, Real))
        return result

    def _note(self, name: str, given: tuple[Any, ...], caller: FrameType) -> None:
        in_arithmetic = name.strip("_").lstrip("ir") in _ARITHMETIC
        candidates = [each for each in given if self._is_candidate(each, in_arithmetic)]
        line = calling_line(caller) if candidates else ""
        if line:
            with disable_dispatch_modes():  # shapes may be inferred here, without values
                for each in candidates:
                    self.seen.append(UsedValue.of(name, line, self._compared(each)))

    def _know(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf

    def _is_candidate(self, given: Any, in_arithmetic: bool) -> bool:
        """Return True for a number or a constant tensor that is of no sample."""
        if not isinstance(given, Tensor):
            is_number = isinstance(given, Real) and not isinstance(given, bool)
            return is_number and (in_arithmetic or not isinstance(given, Integral))
        return (
            type(given) is Tensor
            and given.is_floating_point()
            and not given.requires_grad
            and given.device.type != "meta"
            and given.numel() <= MOST_ELEMENTS
            and not (given.dim() and given.shape[0] in self._rows)  # one value for each sample
            and self._known.get(id(given)) is not given
        )

    def _compared(self, given: Any) -> Any:
        """Return a value, or None for a number that may be one of the batch.

        A whole number may be where the pass has read numbers before, such as lengths of samples.
        """
        if isinstance(given, Tensor):
            self._know([given])
            return given
        is_of_batch = given in self._numbers or given in self._rows
        return None if is_of_batch or (self._has_read and isinstance(given, Integral)) else given
