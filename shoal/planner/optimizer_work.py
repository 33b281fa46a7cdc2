"""Operations as they are counted, and the work of an optimizer's step: one parameter of each shape
is stepped, and counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.costs.work import Affine, OpWork
from shoal.errors import UsageError
from shoal.platform.torch_private.fake_tensors import VALUE_NEEDED
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.subclasses import DispatchMode, disable_dispatch_modes


class CountedOp(NamedTuple):
    kind: str
    flops: float
    moved_bytes: float
    itemsize: int = 4


def tensors_of(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def num_bytes(nest: Any) -> float:
    return float(sum(tensor.nbytes for tensor in tensors_of(nest)))


def storage_key(tensor: Tensor) -> int:
    """Return a number that tells the memory of a tensor from that of others."""
    return id(tensor.untyped_storage())


def affine(first: float, second: float, samples: tuple[int, int]) -> Affine:
    """Return the line through the values of two numbers of samples."""
    low, high = samples
    slope = (second - first) / (high - low)
    return Affine(first - slope * low, slope)


def affine_ops(
    first: Sequence[CountedOp], second: Sequence[CountedOp], samples: tuple[int, int]
) -> tuple[OpWork, ...]:
    """Return the operations of a segment, equal ones together."""
    if [op.kind for op in first] != [op.kind for op in second]:
        more = samples[1] / samples[0]
        second = [
            op._replace(flops=more * op.flops, moved_bytes=more * op.moved_bytes) for op in first
        ]
    counts = Counter(
        (
            a.kind,
            affine(a.flops, b.flops, samples),
            affine(a.moved_bytes, b.moved_bytes, samples),
            a.itemsize,
        )
        for a, b in zip(first, second, strict=True)
    )
    return tuple(
        OpWork(kind, flops, moved, count, itemsize)
        for (kind, flops, moved, itemsize), count in counts.items()
    )


class _StepCounter(DispatchMode):
    """Notes the operations of an optimizer's step, and the most bytes that it holds at once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: list[CountedOp] = []
        self.most = 0.0
        self._alive: dict[int, float] = {}
        self._known = {storage_key(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = tensors_of(result)
        if not outputs:
            return result
        self.ops.append(CountedOp("memory", 0.0, num_bytes((args, kwargs, result))))
        for output in outputs:
            key, storage = storage_key(output), output.untyped_storage()
            if key not in self._known and key not in self._alive:
                self._alive[key] = float(storage.nbytes())
                weakref.finalize(storage, self._alive.pop, key, None).atexit = False
        self.most = max(self.most, sum(self._alive.values()))
        return result


class OptimizerWork(NamedTuple):
    """The step of an optimizer.

    Attributes:
        states: bytes of the state of each parameter, by name.
        ops: of all parameters.
        extra: the most bytes held at once besides the states, as a share of the parameter.
    """

    states: dict[str, float]
    ops: tuple[OpWork, ...]
    extra: float


def optimizer_work(made: Optimizer | Sequence[Optimizer], names: dict[int, str]) -> OptimizerWork:
    """Count a step of one parameter of each shape, and put it together for all parameters.

    Args: names: name of each parameter, by its id.

    Raises: UsageError: a parameter is not the model's.
    """
    counted: dict[Any, tuple[float, tuple[OpWork, ...], float]] = {}
    states: dict[str, float] = {}
    ops: Counter[OpWork] = Counter()
    optimizers = [made] if isinstance(made, Optimizer) else made
    groups = [(type(each), group) for each in optimizers for group in each.param_groups]
    for number, (kind, group) in enumerate(groups):
        options = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's. Make it with model.parameters()."
                )
            key = (number, tuple(parameter.shape), parameter.dtype)
            if key not in counted:
                try:
                    counted[key] = _count_step(kind, options, parameter)
                except VALUE_NEEDED:  # some read values, and tensors without memory have none
                    with disable_dispatch_modes():
                        counted[key] = _count_step(kind, options, parameter)
            size, ops_of_one, _ = counted[key]
            states[names[id(parameter)]] = size
            ops.update({op._replace(number=1): op.number for op in ops_of_one})
    merged = tuple(op._replace(number=number) for op, number in ops.items())
    return OptimizerWork(states, merged, max((c[2] for c in counted.values()), default=0.0))


def _count_step(
    kind: Any, options: dict[str, Any], like: Tensor
) -> tuple[float, tuple[OpWork, ...], float]:
    """Return the state's bytes, the operations and the extra share of one parameter's step."""
    parameter = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
    parameter.grad = torch.zeros(like.shape, dtype=like.dtype)
    try:
        optimizer = kind([{**options, "params": [parameter]}])
    except TypeError as error:  # SAM, which takes the class of another optimizer
        raise UsageError(
            f"{kind.__name__} cannot be made from its groups alone ({error}), so its step "
            "cannot be counted. Plan with an optimizer of torch.optim that keeps as much."
        ) from error
    optimizer.step()  # makes the state
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    with _StepCounter([parameter, parameter.grad, *state]) as counter:
        optimizer.step()
    ops = affine_ops(counter.ops, counter.ops, (2, 4))
    return num_bytes(state), ops, counter.most / max(parameter.nbytes, 1)
