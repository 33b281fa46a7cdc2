"""Values that a loop takes from NumPy and Python into what it computes from a batch.

x = (x - float(a.mean())) / float(a.std())        a = x.numpy(): numbers, compared between ranks
x = torch.from_numpy((a - a.mean()) / a.std())    samples whose origin nothing tells

Operators are told of by the mode that follows a loop. To torch such a tensor is *lifted*.
"""

from __future__ import annotations

from collections.abc import Collection
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoal.platform.script_line import calling_line
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.tensor_state import MemoryWeakRef, memory_of, schema_of
from shoal.trial.used_values import MOST_ELEMENTS, UsedValue

_LIFT = torch.ops.aten.lift_fresh.default


class LiftedValues:
    """Notes what is lifted, and which such values meet samples of a batch.

    Attributes:
        uses: numbers and lifted tensors that operators on samples were given, in order.
        meet_samples: an operator was given a lifted tensor with one entry for each sample.
    """

    def __init__(self) -> None:
        self.uses: list[UsedValue] = []
        self.meet_samples = False
        self._memory: dict[int, Any] = {}

    def is_lifted(self, tensor: Tensor) -> bool:
        """Return True for a tensor that comes from NumPy or Python, or is computed from such."""
        is_plain = tensor.layout is torch.strided and tensor.is_floating_point()
        reference = self._memory.get(memory_of(tensor)) if is_plain else None
        return reference is not None and not reference.expired()

    def after_constants(self, func: Any, given: list[Tensor], output: Any) -> None:
        """Note what an operator without samples among its arguments returns."""
        if func is _LIFT or any(map(self.is_lifted, given)):
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    self._memory[memory_of(tensor)] = MemoryWeakRef(tensor.untyped_storage())

    def before_samples(
        self, func: Any, arguments: Any, samples: int, read: Collection[float], caller: FrameType
    ) -> None:
        """Note the values beside samples among the arguments of an operator.

        Args:
            samples: their number in the batch.
            read: numbers that the script has read from samples, and that are followed.
            caller: the frame that has called the operator.
        """
        values: list[Any] = []
        for leaf in tree_leaves(arguments):
            if type(leaf) is float:
                values.append(leaf)
            elif isinstance(leaf, Tensor) and self.is_lifted(leaf):
                if leaf.shape[:1] == (samples,):
                    self.meet_samples = True
                elif leaf.numel() <= MOST_ELEMENTS:
                    values.append(leaf)
        line = calling_line(caller) if values else ""
        if line:
            name = schema_of(func).name
            for value in values:
                is_read = type(value) is float and value in read
                self.uses.append(UsedValue.of(name, line, None if is_read else value))

    def forget(self) -> None:
        """Forget all values."""
        self.uses, self.meet_samples = [], False
        self._memory.clear()
